#!/usr/bin/env python3
"""A policy learned online against locality and marginal: a contextual bandit on measured step times.

    OMP_NUM_THREADS=1 python3 bench/bandit.py [--seeds 3] [--json]

The bandit is LinUCB (Li et al., "A Contextual-Bandit Approach to Personalized News Article Recommendation", 2010) with
one model for all workers: a request's mean time between tokens is taken to be linear in its worker's requests and
expected active experts when it joined.

    x        = (1, requests, active experts), after the request has joined; x' before
    z        = x + n * (x - x')                what it pays itself, and what the n others pay for it; z = x if selfish
    theta    = A^-1 b,   A = sum of x x^T,   b = sum of x * step_s       over the requests that were served
    worker   = argmin theta . z - alpha * sigma * sqrt(z^T A^-1 z)       under the bounded load of `marginal`

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
from coterie.core import Decision
from coterie.routing import Marginal, Policy, make_policy
from coterie.routing.load import load_only
from coterie.sim import ClusterSpec, Stream, simulate
from coterie.sim.made import Made, made_workload

RATES = (40, 100)
SPANS = {"cold": (15.0, 0.0), "warm": (60.0, 20.0)}  # duration, warm-up
FIGURES = ("tpot_p50_ms", "tpot_p99_ms")
SLACK = 0.3
SCALE = np.array([1.0, 1 / 16, 1 / 100])


class Bandit(Marginal):
    """LinUCB on the expected experts that `marginal` keeps."""

    def __init__(self, targets, *, alpha: float, selfish: bool = False) -> None:
        super().__init__(targets)
        self.name = f"bandit alpha {alpha:g}{', selfish' if selfish else ''}"
        self._alpha, self._selfish = alpha, selfish
        self._precision, self._sums = 1e-3 * np.eye(3), np.zeros(3)
        self._squares, self._number = 0.0, 0
        self._joined: dict[Any, np.ndarray] = {}

    def choose(self, request, workers, rng):
        """Choose the worker of the most hopeful cost."""
        usage = self._usage(request)
        if usage is None or self._batches is None:
            return load_only(workers, "no counts")
        places = self._batches.places([worker.group for worker in workers])
        n, active = self._batches.requests[places], self._batches.active[places]
        before = np.stack([np.ones(len(n)), n, active], axis=1) * SCALE
        after = np.stack([np.ones(len(n)), n + 1, active + self._batches.added(usage)[places]], axis=1) * SCALE
        z = after if self._selfish else after + n[:, None] * (after - before)
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
        super().leased(lease, now_s)
        if self._batches is not None:
            (g,) = self._batches.places([self._group_of[lease.worker]])
            self._joined[lease] = np.array([1.0, self._batches.requests[g], self._batches.active[g]]) * SCALE

    def released(self, lease, served, now_s):
        """See `Watcher.released`."""
        super().released(lease, served, now_s)
        x = self._joined.pop(lease, None)
        if x is not None and served is not None and served.step_s is not None:
            self._precision += np.outer(x, x)
            self._sums += x * served.step_s
            self._squares += served.step_s**2
            self._number += 1


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
    parser.add_argument("--seeds", type=int, default=3, help="paired runs of each case")
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
