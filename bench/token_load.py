#!/usr/bin/env python3
"""Whether load in tokens, or a filter, beats the number of requests where output lengths vary by 10 times.

    OMP_NUM_THREADS=1 python3 bench/token_load.py [--seeds 5] [--json]

The made-up task workload with outputs of 64 to 640 tokens, log-uniform, on 8P16D: with ample KV at three rates, and
with KV that just suffices at the highest of them (1.6 times the mean batch with half of each output decoded).  Limits
are what the gateway knows of an output's length: `exact`, `loose` (1 to 3 times as long), or `none` (256 for all).
Changes are against least_load with the same arrivals: mean over seeds and half a 95 % interval, in per cent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import Decision, RouteRequest, Served, WorkerState
from coterie.routing import KvHeadroom, Lease, Policy, Watcher, make_policy
from coterie.sim import ClusterSpec, Population, Row, Stream, simulate
from coterie.sim.made import made_workload

SHORTEST, LONGEST = 64, 640
RATES = (40, 80, 120)
KV_SLACK = 1.6
DURATION_S = 60.0
WARM_UP_S = 20.0
FIGURES = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p99_ms")
REMEMBERED, ROOM = 100, 64
FIRST_PACE_S = 0.02  # for a token, before any was measured
Limit = Callable[[RouteRequest], int]


class LeastTokens:
    """Least tokens together.

        remaining[i] = max(1, output tokens of request i - (now - its begin) / pace_s)
        together[k]  = sum over requests i of worker k of min(remaining[i], output tokens of the new one)
        worker       = argmin together

    Two requests on one worker make each other's steps longer for as long as both decode, which is the shorter of what
    they have left: `together` counts these tokens, for the new request and for those that it joins alike.  Where all
    outputs are of one length it prefers workers whose requests will soon be over.  Ties go to the fewest requests, then
    to the least recently assigned.

    Output tokens are the client's limit, or the gateway's default.  `pace_s` is how long the last hundred requests or
    so were held for each token of their limits: where outputs stay below them, all limits are taken for that much
    shorter.  Now is the time of the last assignment or release.

    It follows the ledger (`Watcher`).

    Args:
        targets: all workers that may ever be chosen from, in the gateway's order.
    """

    name = "least_tokens"
    reads = frozenset()

    def __init__(self, targets: Sequence[WorkerState]) -> None:
        self._place = {target.name: k for k, target in enumerate(targets)}
        self._held = _Held()
        self._pace_s, self._measured = FIRST_PACE_S, 0
        self._now_s = 0.0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the worker where the request shares the fewest tokens."""
        tokens = self._held.remaining(self._now_s, self._pace_s)
        np.minimum(tokens, max(request.output_tokens, 1), out=tokens)
        together = np.bincount(self._held.places, tokens, minlength=len(self._place)).tolist()
        loads = [together[self._place[worker.name]] for worker in workers]
        best = min(zip(loads, workers, strict=True), key=lambda one: (one[0], one[1].requests, one[1].assigned))[1]
        return Decision(
            best.name,
            "least tokens",
            scores=tuple((worker.name, -load) for worker, load in zip(workers, loads, strict=True)),
        )

    def leased(self, lease: Lease, now_s: float) -> None:
        """See `Watcher.leased`."""
        self._now_s = now_s
        self._held.add(lease, self._place[lease.worker], now_s)

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        """See `Watcher.released`."""
        self._now_s = now_s
        begin_s, tokens = self._held.remove(lease)
        if now_s > begin_s:
            self._measured = min(self._measured + 1, REMEMBERED)
            self._pace_s += ((now_s - begin_s) / tokens - self._pace_s) / self._measured


class _Held:
    """The requests in flight as columns: worker, begin in seconds, output tokens.  The last fills a gap."""

    def __init__(self) -> None:
        self._columns = np.empty((3, ROOM))
        self._position: dict[Lease, int] = {}
        self._leases: list[Lease] = []

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """`[requests]` the worker of each."""
        return self._columns[0, : len(self._leases)].astype(np.int64)

    def remaining(self, now_s: float, pace_s: float) -> npt.NDArray[np.float64]:
        """`[requests]` output tokens that each is expected to have left, at least one."""
        _, begins, tokens = self._columns[:, : len(self._leases)]
        left: npt.NDArray[np.float64] = np.maximum(tokens - (now_s - begins) / pace_s, 1.0)
        return left

    def add(self, lease: Lease, place: int, now_s: float) -> None:
        """A request came."""
        number = len(self._leases)
        if number == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._columns[:, number] = place, now_s, max(lease.request.output_tokens, 1)
        self._position[lease] = number
        self._leases.append(lease)

    def remove(self, lease: Lease) -> tuple[float, float]:
        """It is over.

        Returns:
            its begin in seconds, and its output tokens.
        """
        position, last = self._position.pop(lease), self._leases.pop()
        _, begin_s, tokens = self._columns[:, position].tolist()
        if last is not lease:
            self._columns[:, position] = self._columns[:, len(self._leases)]
            self._position[last] = position
            self._leases[position] = last
        return begin_s, tokens


class Limited:
    """A policy that is shown each request's limit where the simulator has its output's length."""

    def __init__(self, policy: Policy, limit: Limit) -> None:
        self.name, self.reads = policy.name, policy.reads
        self._policy, self._limit = policy, limit
        self._shown: dict[Lease, Lease] = {}

    def _limited(self, request: RouteRequest) -> RouteRequest:
        return replace(request, output_tokens=self._limit(request))

    def choose(self, request, workers, rng):
        """See `Policy.choose`."""
        return self._policy.choose(self._limited(request), workers, rng)

    def leased(self, lease, now_s):
        """See `Watcher.leased`."""
        if isinstance(self._policy, Watcher):
            shown = self._shown[lease] = Lease(None, lease.worker, self._limited(lease.request), lease.sequence)
            self._policy.leased(shown, now_s)

    def released(self, lease, served, now_s):
        """See `Watcher.released`."""
        if isinstance(self._policy, Watcher):
            self._policy.released(self._shown.pop(lease), served, now_s)


def loose(request: RouteRequest) -> int:
    return round(request.output_tokens * np.random.default_rng(int(request.id)).uniform(1, 3))


LIMITS: dict[str, Limit] = {"exact": lambda request: request.output_tokens, "loose": loose, "none": lambda request: 256}


@dataclass(frozen=True)
class Case:
    """One way of routing at one rate."""

    kv: str
    rate: int
    policy: str
    limits: str = "exact"
    filtered: bool = False


def workload() -> tuple[Population, ClusterSpec]:
    made = made_workload("task")
    lengths = np.exp(np.random.default_rng(1).uniform(np.log(SHORTEST), np.log(LONGEST), len(made.population)))
    requests = zip(made.population.requests, lengths.round().astype(int).tolist(), strict=True)
    varied = tuple(replace(request, output_tokens=length) for request, length in requests)
    return replace(made.population, requests=varied), ClusterSpec(8, 16, step_time=made.step_time)


def run(population: Population, spec: ClusterSpec, case: Case, seed: int) -> Row:
    if case.filtered:
        spec = replace(spec, filters=(KvHeadroom(0.9),))
    targets = spec.targets("decode")
    policy = LeastTokens(targets) if case.policy == LeastTokens.name else make_policy(case.policy, targets)
    decode = Limited(policy, LIMITS[case.limits])
    prefill = make_policy("prefix", spec.targets("prefill"))
    traffic = Stream(case.rate, DURATION_S)
    return simulate(population, traffic, spec, prefill=prefill, decode=decode, seed=seed, warm_up_s=WARM_UP_S)


def change(rows: list[Row], base: list[Row], figure: str) -> dict[str, float]:
    pairs = zip(rows, base, strict=True)
    percent = np.array([100 * (getattr(one, figure) / getattr(other, figure) - 1) for one, other in pairs])
    half = 1.96 * percent.std(ddof=1) / np.sqrt(len(percent)) if len(percent) > 1 else float("nan")
    return {"change_percent": float(percent.mean()), "half_interval": float(half)}


def cases(kv: str, rate: int) -> Iterator[Case]:
    yield Case(kv, rate, "round_robin")
    for limits in LIMITS:
        yield Case(kv, rate, "least_tokens", limits)
    if kv == "scarce":
        yield Case(kv, rate, "least_load", filtered=True)
        yield Case(kv, rate, "least_tokens", filtered=True)


def measure(seeds: int) -> Iterator[dict[str, Any]]:
    population, ample = workload()
    base: list[Row] = []
    for rate in RATES:
        base = [run(population, ample, Case("ample", rate, "least_load"), seed) for seed in range(seeds)]
        yield from compare(population, ample, cases("ample", rate), base)
    tokens = float(np.mean([request.prompt_tokens + request.output_tokens / 2 for request in population.requests]))
    batch = float(np.mean([row.batch_mean for row in base if row.batch_mean is not None]))
    scarce = replace(ample, kv_tokens=round(KV_SLACK * batch * tokens))
    base = [run(population, scarce, Case("scarce", RATES[-1], "least_load"), seed) for seed in range(seeds)]
    yield from compare(population, scarce, cases("scarce", RATES[-1]), base)


def compare(
    population: Population, spec: ClusterSpec, some: Iterator[Case], base: list[Row]
) -> Iterator[dict[str, Any]]:
    for case in some:
        rows = [run(population, spec, case, seed) for seed in range(len(base))]
        preemptions = {"preemptions": sum(row.preemptions for row in rows) / max(sum(r.preemptions for r in base), 1)}
        yield {**asdict(case), **{name: change(rows, base, name) for name in FIGURES}, **preemptions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="paired runs of each case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(f"{'KV':8}{'rate':>5}  {'policy':24}{'limits':8}" + "".join(f"{name:>16}" for name in FIGURES))
    for row in measure(options.seeds):
        rows.append(row)
        if not options.json:
            print(as_line(row), flush=True)
    if options.json:
        print(json.dumps({"seeds": options.seeds, "rows": rows}, indent=2))


def as_line(row: dict[str, Any]) -> str:
    policy = row["policy"] + (", filtered" if row["filtered"] else "")
    cells = (f"{row[name]['change_percent']:+.1f} ± {row[name]['half_interval']:.1f}" for name in FIGURES)
    return f"{row['kv']:8}{row['rate']:5}  {policy:24}{row['limits']:8}" + "".join(f"{cell:>16}" for cell in cells)


if __name__ == "__main__":
    main()
