#!/usr/bin/env python3
"""What fitting, refitting and routing cost at the size of Qwen3-30B-A3B: 48 layers of 128 experts, top-8.

    python3 bench/routing.py [--json]

The counts are made up: each domain favours its own experts, as a trained model does.  Fits and refits are in CPU time
of the whole process.  Decisions are in wall-clock time, the median over 100 batches of 20; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import cycle

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.core import ExpertCounts, ModelGeometry, RouteRequest, WorkerState, prompt_hash
from coterie.routing import Lease, Ledger, LocalityRefit, Marginal, Policy, make_policy, route
from coterie.routing.marginal_batches import row_of, usage_of
from coterie.routing.shared_batches import SharedBatches
from coterie.routing.shared_load import Board
from coterie.wire import decode_counts, encode_counts

GEOMETRY = ModelGeometry(layers=48, experts=128, top_k=8)
REQUESTS = 1000
DOMAINS = 20
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 8
DECISIONS = 2000
BATCH = 20


def made_up_counts(rng: np.random.Generator, affinity: np.ndarray, tokens: int) -> np.ndarray:
    """`[L, E]` counts of tokens that choose by `affinity` plus noise: the Gumbel trick draws without replacement."""
    counts = np.zeros((GEOMETRY.layers, GEOMETRY.experts), np.uint16)
    noise = rng.gumbel(size=(tokens, GEOMETRY.layers, GEOMETRY.experts)).astype(np.float32)
    chosen = np.argpartition(affinity + noise, -GEOMETRY.top_k, axis=-1)[..., -GEOMETRY.top_k :]
    for layer in range(GEOMETRY.layers):
        counts[layer] = np.bincount(chosen[:, layer].ravel(), minlength=GEOMETRY.experts)
    return counts


def made_up_trace() -> ActivationTrace:
    rng = np.random.default_rng(0)
    affinities = 2 * rng.normal(size=(DOMAINS, GEOMETRY.layers, GEOMETRY.experts)).astype(np.float32)
    domains = rng.integers(DOMAINS, size=REQUESTS)
    return ActivationTrace(
        model="made-up",
        geometry=GEOMETRY,
        prefill=np.stack([made_up_counts(rng, affinities[d], PROMPT_TOKENS) for d in domains]),
        decode=np.stack([made_up_counts(rng, affinities[d], OUTPUT_TOKENS - 1) for d in domains]),
        prefill_tokens=np.full(REQUESTS, PROMPT_TOKENS),
        prefill_covered=np.full(REQUESTS, PROMPT_TOKENS),
        decode_tokens=np.full(REQUESTS, OUTPUT_TOKENS),
        decode_covered=np.full(REQUESTS, OUTPUT_TOKENS - 1),
        prompt_hashes=tuple(prompt_hash([i]) for i in range(REQUESTS)),
        labels=tuple(f"domain {d}" for d in domains),
    )


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call."""
    samples = []
    for _ in range(DECISIONS // BATCH):
        started = time.perf_counter_ns()
        for _ in range(BATCH):
            call()
        samples.append((time.perf_counter_ns() - started) / BATCH / 1000)
    return statistics.median(samples)


def measure_fit(trace: ActivationTrace, clusters: int) -> tuple[Profile, float]:
    started = time.process_time()
    profile = fit(trace, clusters)
    return profile, time.process_time() - started


def measure_policies(trace: ActivationTrace, profile: Profile, workers: int) -> dict[str, float]:
    """Microseconds per decision, by policy, with some load on every worker."""
    targets = [WorkerState(f"d{i}", f"d{i}") for i in range(workers)]
    requests, rng = cycle(asked(trace)), np.random.default_rng(0)
    times = {}
    for name in ("round_robin", "random", "least_load", "power_of_two", "prefix", "domain", "locality", "marginal"):
        policy = make_policy(name, targets, profile=profile, trace=trace)
        ledger = loaded_ledger(trace, policy, targets)
        times[name] = microseconds(
            lambda policy=policy, ledger=ledger: route(policy, next(requests), ledger.states(), rng)
        )
    return times


def asked(trace: ActivationTrace) -> list[RouteRequest]:
    return [
        RouteRequest(
            str(i),
            counts=ExpertCounts(GEOMETRY, trace.prefill[i], PROMPT_TOKENS, PROMPT_TOKENS),
            prompt_hash=trace.prompt_hashes[i],
            prefix=trace.prompt_hashes[i].encode(),
        )
        for i in range(256)
    ]


def loaded_ledger(trace: ActivationTrace, policy: Policy, targets: list[WorkerState]) -> Ledger:
    """A ledger with four requests on each worker, on average, that the policy follows."""
    ledger, requests = Ledger(targets), cycle(asked(trace))
    ledger.follow(policy)
    for worker in np.random.default_rng(0).integers(len(targets), size=4 * len(targets)):
        ledger.lease(f"d{worker}", next(requests))
    return ledger


def measure_shared(trace: ActivationTrace, workers: int, processes: int) -> dict[str, float]:
    """Microseconds of a decision of `marginal` before which each other process leased once and released once.

    And of taking in what those requests use, beside decisions.
    """
    targets = [WorkerState(f"d{i}", f"d{i}") for i in range(workers)]
    names = [target.name for target in targets]
    board, rng = Board(bytearray(Board.size(processes)), processes), np.random.default_rng(0)
    requests, rows = cycle(asked(trace)), cycle([row_of(usage_of(request.counts)) for request in asked(trace)[:32]])
    policy, ledger = Marginal(targets), Ledger(targets, others=board.row(1, 0))
    others = [Ledger(targets, others=board.row(1, i)) for i in range(1, processes)]
    held: deque[Lease] = deque()
    decided, taken_in = [], []
    with ExitStack() as stack:
        views = [
            stack.enter_context(closing(SharedBatches(board.announcements, i, names, GEOMETRY)))
            for i in range(processes)
        ]
        policy.share(lambda groups, geometry: views[0])
        ledger.follow(policy)
        for worker in rng.integers(workers, size=4 * workers):
            ledger.lease(f"d{worker}", next(requests))
        for _ in range(DECISIONS // BATCH):
            for other, view in zip(others, views[1:], strict=True):
                worker = int(rng.integers(workers))
                held.append(other.lease(names[worker], next(requests)))
                view.show(worker, next(rows), +1)
                if len(held) > processes:  # as much load as before
                    held.popleft().release()
            decided.append(once(lambda: route(policy, next(requests), ledger.states(), rng)))
            taken_in.append(once(lambda: policy.due((), 0.0)))
    return {
        f"of {processes} processes": statistics.median(decided),
        f"taking in {processes - 1} requests of others": statistics.median(taken_in),
    }


def once(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1000


def measure_marginal(trace: ActivationTrace, workers: int) -> dict[str, float]:
    """Microseconds of a decision of `marginal`, and of telling it of a lease and its end, which come after."""
    targets = [WorkerState(f"d{i}", f"d{i}") for i in range(workers)]
    policy = make_policy("marginal", targets)
    ledger, rng = loaded_ledger(trace, policy, targets), np.random.default_rng(0)
    requests = cycle(asked(trace))
    return {
        f"marginal, {workers} workers": microseconds(lambda: route(policy, next(requests), ledger.states(), rng)),
        f"lease and release, {workers} workers": microseconds(lambda: ledger.lease("d7", next(requests)).release()),
    }


def measure_refit(trace: ActivationTrace, profile: Profile, workers: int) -> float:
    """CPU seconds of one refit to a full window that is found to hold nothing new."""
    targets = [WorkerState(f"d{i}", f"d{i}") for i in range(workers)]
    policy, ledger = LocalityRefit(profile, targets), Ledger(targets)
    ledger.follow(policy)
    for i in range(REQUESTS):
        counts = ExpertCounts(GEOMETRY, trace.prefill[i], PROMPT_TOKENS, PROMPT_TOKENS)
        ledger.lease("d0", RouteRequest(str(i), counts=counts))
    job = policy.due(ledger.states(), time.monotonic())
    started = time.process_time()
    job.run()
    return time.process_time() - started


def measure_parts(trace: ActivationTrace, profile: Profile) -> dict[str, float]:
    """Microseconds of the steps around a decision."""
    counts = ExpertCounts(GEOMETRY, trace.prefill[0], PROMPT_TOKENS, PROMPT_TOKENS)
    envelope = encode_counts(counts)
    ledger = Ledger([WorkerState(f"d{i}", f"d{i}") for i in range(256)])
    request = RouteRequest("r", counts=counts)
    return {
        "read the counts envelope": microseconds(lambda: decode_counts(envelope)),
        "counts to signature": microseconds(lambda: profile.transform.apply(counts.counts)),
        "states of 256 workers": microseconds(ledger.states),
        "lease and release": microseconds(lambda: ledger.lease("d7", request).release()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    trace = made_up_trace()
    fits = {clusters: measure_fit(trace, clusters) for clusters in (16, 64)}
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "fit_cpu_s": {f"{REQUESTS} requests, {k} clusters": seconds for k, (_, seconds) in fits.items()},
        "refit_cpu_s": {f"{k} workers": measure_refit(trace, profile, k) for k, (profile, _) in fits.items()},
        "decision_us": {f"{k} workers": measure_policies(trace, profile, k) for k, (profile, _) in fits.items()},
        "marginal_us": measure_marginal(trace, 16) | measure_shared(trace, 16, 4) | measure_marginal(trace, 256),
        "parts_us": measure_parts(trace, fits[16][0]),
    }
    print(json.dumps(report, indent=2) if as_json else as_table(report))


def as_table(report: dict) -> str:
    lines = [report["machine"], f"{GEOMETRY}", "", "fit (CPU s)"]
    lines += [f"  {name:30}{seconds:9.2f}" for name, seconds in report["fit_cpu_s"].items()]
    lines += ["", "refit to a full window (CPU s)"]
    lines += [f"  {name:30}{seconds:9.2f}" for name, seconds in report["refit_cpu_s"].items()]
    lines += ["", f"{'one decision (us)':32}" + "".join(f"{pool:>14}" for pool in report["decision_us"])]
    pools = list(report["decision_us"].values())
    lines += [f"  {name:30}" + "".join(f"{pool[name]:14.1f}" for pool in pools) for name in pools[0]]
    lines += ["", "marginal, and what it does when told of leases (us)"]
    lines += [f"  {name:30}{value:9.1f}" for name, value in report["marginal_us"].items()]
    lines += ["", "steps around it (us)"]
    lines += [f"  {name:30}{value:9.1f}" for name, value in report["parts_us"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
