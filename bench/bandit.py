#!/usr/bin/env python3
"""A policy learned online against locality and marginal: a contextual bandit on measured step times.

    OMP_NUM_THREADS=1 python3 bench/bandit.py [--seeds 2] [--json]

The bandit is LinUCB (Li et al., "A Contextual-Bandit Approach to Personalized News Article Recommendation", 2010) with
one model for all workers: a request's mean time between tokens is taken to be linear in its worker's requests and
expected active experts when it joined.

    x        = (1, requests, active experts), after the request has joined; x' before
    z        = x + n * (x - x')                what it pays itself, and what the n others pay for it; z = x if selfish
    theta    = A^-1 b,   A = sum of x x^T,   b = sum of x * step_s       over the requests that were served
    worker   = argmin theta . z - alpha * sigma * sqrt(z^T A^-1 z)       among workers below 1.3 times the mean load

alpha = 0 never explores but by what requests happen to show.  Changes in per cent are against least_load with the same
arrivals on 8P16D; `cold` are requests of the first 15 s, in which it has to learn, `warm` those that arrive after 20 s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from coterie.calibration import Profile, fit
from coterie.core import Decision, RouteRequest
from coterie.routing import Policy, Reads, make_policy
from coterie.sim import ClusterSpec, Stream, simulate
from coterie.sim.made import Made, made_workload

RATES = (40, 100)
SPANS = {"cold": (15.0, 0.0), "warm": (60.0, 20.0)}  # duration, warm-up
FIGURES = ("tpot_p50_ms", "tpot_p99_ms")
SLACK = 0.3
SCALE = np.array([1.0, 1 / 16, 1 / 100])


class Bandit:
    """LinUCB on requests and expected active experts, kept as sums of the logarithms of experts' being idle."""

    reads = frozenset({Reads.COUNTS})

    def __init__(self, targets, *, alpha: float, selfish: bool = False) -> None:
        self.name = f"bandit alpha {alpha:g}{', selfish' if selfish else ''}"
        self._alpha, self._selfish = alpha, selfish
        self._place = {target.name: k for k, target in enumerate(targets)}
        self._requests = np.zeros(len(targets))
        self._idle: np.ndarray | None = None  # (workers, L * E)
        self._held: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._precision, self._sums = 1e-3 * np.eye(3), np.zeros(3)
        self._squares, self._number = 0.0, 0

    def choose(self, request, workers, rng):
        """Choose the worker of the most hopeful cost."""
        places = [self._place[worker.name] for worker in workers]
        after = self._features(places, _logarithms(request))
        before = self._features(places)
        z = after if self._selfish else after + self._requests[places, None] * (after - before)
        inverse = np.linalg.inv(self._precision)
        theta = inverse @ self._sums
        sigma = np.sqrt(max(self._squares - theta @ self._sums, 0) / max(self._number - 3, 1)) or 1.0
        costs = z @ theta - self._alpha * sigma * np.sqrt(np.einsum("kd,de,ke->k", z, inverse, z))
        most = (1 + SLACK) * (sum(worker.requests for worker in workers) / len(workers) + 1)
        eligible = [k for k, worker in enumerate(workers) if worker.requests + 1 <= most]
        best = min(eligible, key=lambda k: (costs[k], workers[k].requests, workers[k].assigned))
        return Decision(workers[best].name, "bandit")

    def leased(self, lease, now_s):
        """See `Watcher.leased`; the worker's state with the request in it is what its step time will be put down to."""
        k, row = self._place[lease.worker], _logarithms(lease.request)
        self._features([k], row)
        self._idle[k] += row
        self._requests[k] += 1
        self._held[lease] = row, self._features([k])[0]

    def released(self, lease, served, now_s):
        """See `Watcher.released`."""
        k, (row, x) = self._place[lease.worker], self._held.pop(lease)
        self._idle[k] -= row
        self._requests[k] -= 1
        if served is not None and served.step_s is not None:
            self._precision += np.outer(x, x)
            self._sums += x * served.step_s
            self._squares += served.step_s**2
            self._number += 1

    def _features(self, places: list[int], joining: np.ndarray | None = None) -> np.ndarray:
        """`[places, 3]`, with a request that joins each of them if one is given."""
        if self._idle is None:
            self._idle = np.zeros((len(self._place), len(joining) if joining is not None else 1))
        idle = self._idle[places] if joining is None else self._idle[places] + joining
        requests = self._requests[places] + (joining is not None)
        return np.stack([np.ones(len(places)), requests, (1 - np.exp(idle)).sum(axis=1)], axis=1) * SCALE


def _logarithms(request: RouteRequest) -> np.ndarray:
    usage = request.counts.counts.ravel() / request.counts.covered
    return np.log1p(-np.minimum(usage, 1 - 1e-6))


def policies(made: Made, spec: ClusterSpec, profile: Profile) -> dict[str, Any]:
    targets = spec.targets("decode")
    named = {name: partial(make_policy, name, targets, profile=profile) for name in ("locality", "marginal")}
    for options in ({"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 4.0}, {"alpha": 1.0, "selfish": True}):
        make = partial(Bandit, targets, **options)
        named[make().name] = make
    return named


def run(made: Made, spec: ClusterSpec, decode: Policy, rate: float, span: str, seed: int) -> dict[str, float]:
    duration_s, warm_up_s = SPANS[span]
    prefill = make_policy("prefix", spec.targets("prefill"))
    traffic = Stream(rate, duration_s)
    row = simulate(made.population, traffic, spec, prefill=prefill, decode=decode, seed=seed, warm_up_s=warm_up_s)
    return {figure: getattr(row, figure) for figure in FIGURES}


def measure(seeds: int) -> Iterator[dict[str, Any]]:
    for workload in ("task", "language"):
        made = made_workload(workload)
        spec = ClusterSpec(8, 16, step_time=made.step_time)
        profile = fit(made.calibration, 16)
        for rate in RATES:
            for span in SPANS:
                least_load = partial(make_policy, "least_load", spec.targets("decode"))
                base = [run(made, spec, least_load(), rate, span, seed) for seed in range(seeds)]
                for name, make in policies(made, spec, profile).items():
                    rows = [run(made, spec, make(), rate, span, seed) for seed in range(seeds)]
                    yield {"workload": workload, "rate": rate, "span": span, "policy": name, **changes(rows, base)}


def changes(rows: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    pairs = list(zip(rows, base, strict=True))
    return {figure: float(np.mean([100 * (a[figure] / b[figure] - 1) for a, b in pairs])) for figure in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="paired runs of each case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(f"{'workload':10}{'rate':>5}  {'':6}{'policy':24}{'P50 %':>8}{'P99 %':>8}")
    for row in measure(options.seeds):
        rows.append(row)
        if not options.json:
            cells = "".join(f"{row[figure]:+8.1f}" for figure in FIGURES)
            print(f"{row['workload']:10}{row['rate']:5}  {row['span']:6}{row['policy']:24}{cells}", flush=True)
    if options.json:
        print(json.dumps({"seeds": options.seeds, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
