#!/usr/bin/env python3
"""Whether a decode policy is better than the best load balancer at every workload and rate, and than static locality.

    OMP_NUM_THREADS=1 python3 bench/policies.py [--seeds 10] [--cells A,B] [--policies A,B] [--processes 1] [--json]

Cells: the made-up task and language workloads on three models, 8P16D; and recorded outputs of coterie-tiny and tiny-moe
replayed on 8P8D, evenly from their domains or skewed to two languages under a profile of all.  All policies of a seed
meet the same arrivals.  Warm-up is 1.5 times the life of the slowest cell's requests, and is in no figure.

For each cell and rate: change of TPOT P50 and P99 in per cent against the best of the load balancers (of least mean,
for each of the two figures), mean over seeds, and for P99 the upper end of its 95 % interval (Student's t over pairs).
`all` is the mean over the rates, with the highest of the upper ends.  Outputs have `--output-tokens` tokens, and rates
are scaled so that workers hold what they would hold with 512.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.latency import QWEN3_30B_MI300X, StepTime
from coterie.routing import make_policy
from coterie.sim import ClusterSpec, Population, Stream, population_of, simulate
from coterie.sim.made import made_workload
from coterie.sim.paired import paired_change

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from traces import coterie_tiny_trace, tiny_moe_trace

BALANCERS = ("round_robin", "least_load")
POLICIES = ("locality", "marginal")
LANGUAGES = ("de", "zh")
MODELS = ("qwen", "gptoss", "gemma")
RATES = (20, 40, 60, 80, 100)
TRACES: dict[str, Callable[[], ActivationTrace]] = {"coterie-tiny": coterie_tiny_trace, "tiny-moe": tiny_moe_trace}
TRACE_RATES = (6, 12, 20, 33)
FULL_TOKENS = 512
LIFE_S = 27.0
"""Of a request of 512 tokens, the longest of any cell (GPT-OSS-120B at 100 requests a second)."""


@dataclass(frozen=True)
class Cell:
    """A workload with the cluster that serves it.

    Attributes:
        population: requests.
        trace: labelled ones, to fit to.
        profile: of as many clusters as workers.
        spec: the cluster.
        rates: requests a second, of 512 output tokens.
    """

    population: Population
    trace: ActivationTrace
    profile: Profile
    spec: ClusterSpec
    rates: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One run's place and what it gave, in ms."""

    cell: str
    rate: int
    policy: str
    seed: int
    p50: float
    p99: float


def cells() -> list[str]:
    made = [f"{workload}-{model}" for workload in ("task", "language") for model in MODELS]
    return [*made, *(f"{name}-{mix}" for name in TRACES for mix in ("even", "skewed"))]


@cache
def cell(name: str, output_tokens: int) -> Cell:
    head, _, tail = name.rpartition("-")
    if head not in TRACES:
        made = made_workload(head, tail)
        spec = ClusterSpec(8, 16, step_time=made.step_time)
        return Cell(_of(made.population, output_tokens), made.calibration, fit(made.calibration, 16), spec, RATES)
    trace = TRACES[head]()
    fitted, served = (trace.select(np.arange(first, len(trace), 2)) for first in (0, 1))
    if tail == "skewed":
        served = served.select([i for i, label in enumerate(served.labels) if label in LANGUAGES])
    pairs = trace.geometry.layers * trace.geometry.experts
    full = QWEN3_30B_MI300X
    # a step that activates all experts takes as long as it does for the model that was measured
    time = StepTime(full.fixed_s, full.per_request_s, full.per_expert_s * 48 * 128 / pairs)
    population = population_of(served, output_tokens=output_tokens)
    return Cell(population, fitted, fit(fitted, 8), ClusterSpec(8, 8, step_time=time), TRACE_RATES)


def _of(population: Population, output_tokens: int) -> Population:
    requests = (replace(request, output_tokens=output_tokens) for request in population.requests)
    return Population(tuple(requests), population.experts)


def run(task: tuple[str, int, str, int], output_tokens: int, requests: int) -> Run:
    name, rate, policy, seed = task
    of = cell(name, output_tokens)
    scaled = rate * FULL_TOKENS / output_tokens
    warm_up_s = 1.5 * LIFE_S * output_tokens / FULL_TOKENS
    row = simulate(
        of.population,
        Stream(scaled, warm_up_s + requests / scaled),
        of.spec,
        prefill=make_policy("prefix", of.spec.targets("prefill")),
        decode=make_policy(policy, of.spec.targets("decode"), profile=of.profile, trace=of.trace),
        seed=seed,
        warm_up_s=warm_up_s,
    )
    assert row.tpot_p50_ms is not None
    assert row.tpot_p99_ms is not None
    return Run(name, rate, policy, seed, row.tpot_p50_ms, row.tpot_p99_ms)


@dataclass(frozen=True)
class Change:
    """A policy against the best load balancer, in per cent.

    Attributes:
        cell: which.
        rate: None for the mean over the cell's rates.
        policy: which.
        p50: change of the median.
        p99: change of the 99th percentile.
        p99_high: upper end of its 95 % interval; of the mean over rates, the highest of theirs.
    """

    cell: str
    rate: int | None
    policy: str
    p50: float
    p99: float
    p99_high: float


def changes(runs: list[Run], names: list[str], policies: list[str]) -> Iterator[Change]:
    """Changes of every cell, rate by rate and then over all."""
    for name in names:
        of_cell = [one for one in runs if one.cell == name]
        rates = sorted({one.rate for one in of_cell})
        found = {
            policy: [_change([one for one in of_cell if one.rate == rate], name, rate, policy) for rate in rates]
            for policy in policies
        }
        for rates_of in zip(*found.values(), strict=True):
            yield from rates_of
        for policy, each in found.items():
            p50, p99 = (float(np.mean([getattr(one, field) for one in each])) for field in ("p50", "p99"))
            yield Change(name, None, policy, p50, p99, max(one.p99_high for one in each))


def _change(runs: list[Run], name: str, rate: int, policy: str) -> Change:
    def of(which: str, field: str) -> list[float]:
        return [getattr(one, field) for one in runs if one.policy == which]

    found = {
        field: paired_change(of(policy, field), min((of(one, field) for one in BALANCERS), key=sum))
        for field in ("p50", "p99")
    }
    p50, p99 = found["p50"], found["p99"]
    return Change(name, rate, policy, 100 * p50.mean, 100 * p99.mean, 100 * p99.high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--cells", default=",".join(cells()))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--requests", type=int, default=3000, help="after the warm-up, in each run")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    names, policies = args.cells.split(","), args.policies.split(",")
    tasks = [
        (name, rate, policy, seed)
        for name in names
        for rate in (TRACE_RATES if name.rpartition("-")[0] in TRACES else RATES)
        for policy in dict.fromkeys((*BALANCERS, *policies))
        for seed in range(args.seeds)
    ]
    one = partial(run, output_tokens=args.output_tokens, requests=args.requests)
    if args.processes > 1:
        with Pool(args.processes) as pool:
            runs = pool.map(one, tasks, chunksize=max(1, len(tasks) // (8 * args.processes)))
    else:
        runs = [one(task) for task in tasks]
    found = list(changes(runs, names, policies))
    if args.json:
        print(json.dumps({"runs": [asdict(each) for each in runs], "changes": [asdict(each) for each in found]}))
    else:
        print(as_table(found, policies))


def as_table(found: list[Change], policies: list[str]) -> str:
    lines = [
        "change against the best load balancer, in per cent: P50 / P99 (upper end of its 95 % interval)",
        f"{'':22}{'rate':>5}" + "".join(f"{policy:>26}" for policy in policies),
    ]
    for first in range(0, len(found), len(policies)):
        row = found[first : first + len(policies)]
        rate = "all" if row[0].rate is None else row[0].rate
        figures = (f"{one.p50:+.1f} / {one.p99:+.1f} ({one.p99_high:+.1f})" for one in row)
        lines.append(f"{row[0].cell:22}{rate:>5}" + "".join(f"{each:>26}" for each in figures))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
