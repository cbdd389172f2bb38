#!/usr/bin/env python3
"""How much of the best assignment's gain over least_load each decode policy reaches.

    OMP_NUM_THREADS=1 python3 bench/oracle.py [--draws 2] [--json]

Cases are batches (requests come one by one, none ends; what counts is the batch that results) and streams (requests
come and go).  Half of each trace calibrates, the other is drawn from.  The best assignment knows the experts of every
output and all requests to come; no worker of it holds more than 1.25 times what one of least_load's holds at its worst.
Where all sets of so many requests can be listed there is a bound that no assignment can beat, and the gap to it is
printed; elsewhere the best is that of local searches from several starts.

`informed` puts each request where it adds least, knowing the experts of all that came before: what it lacks is the
future, what a policy lacks beyond that are the true experts and a better rule.

A policy's share is (least_load - policy) / (least_load - best) in mean TPOT over the draws.  Step times are those of
Qwen3-30B-A3B on an MI300X, every layer of a smaller model standing for as many of its 48 layers as it takes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.core import RouteRequest, WorkerState
from coterie.latency import QWEN3_30B_MI300X, StepTime
from coterie.routing import DECODE_POLICIES, make_policy
from coterie.sim import population_of
from coterie.sim.made import made_workload
from coterie.sim.optimum import MOST_SETS, best_partition, count_sets
from coterie.sim.oracle import Instance, assign_by, best_found, one_by_one

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from traces import coterie_tiny_trace, tiny_moe_trace

PUBLISHED_LAYERS = 48
SLACK = 1.25
SHAPES = ((8, 32), (16, 48), (8, 64), (8, 192))  # workers, requests
POLICIES = tuple(name for name in DECODE_POLICIES if name != "locality_refit")  # it learns from more than one batch
SHOWN = (*(name for name in POLICIES if name != "least_load"), "informed")
STARTS = ("least_load", "locality", "marginal")
STREAM = (8, 64, 160)  # workers, requests alive at once on average, requests


@dataclass(frozen=True)
class Workload:
    """What requests are drawn from.

    Attributes:
        name: in the table.
        requests: as policies see them.
        probabilities: `[N, L, E]` of their outputs' experts.
        calibration: other requests, to fit profiles to.
        step: step time.
    """

    name: str
    requests: tuple[RouteRequest, ...]
    probabilities: np.ndarray
    calibration: ActivationTrace
    step: StepTime


def recorded(name: str, trace: ActivationTrace, step: StepTime, domains: tuple[str, ...] = ()) -> Workload:
    """Every other request calibrates; with `domains`, only requests of these are served."""
    served = trace.select(np.arange(1, len(trace), 2))
    if domains:
        served = served.select(np.flatnonzero(np.isin(served.labels, domains)))
    probabilities = served.decode / served.decode_covered[:, None, None]
    calibration = trace.select(np.arange(0, len(trace), 2))
    return Workload(name, population_of(served).requests, probabilities, calibration, step)


def workloads() -> Iterator[Workload]:
    tiny, coterie_tiny = tiny_moe_trace(), coterie_tiny_trace()
    yield recorded("tiny-moe, even", tiny, of_layers(5))
    yield recorded("tiny-moe, two domains", tiny, of_layers(5), tuple(sorted(set(tiny.labels))[:2]))
    yield recorded("coterie-tiny, even", coterie_tiny, of_layers(coterie_tiny.geometry.layers))
    for name in ("task", "language"):
        made = made_workload(name, requests=1, calibration=1200)
        yield recorded(f"made-up {name}", made.calibration, made.step_time)


def of_layers(layers: int) -> StepTime:
    return replace(QWEN3_30B_MI300X, per_expert_s=QWEN3_30B_MI300X.per_expert_s * PUBLISHED_LAYERS / layers)


def batch(workload: Workload, workers: int, chosen: np.ndarray, rng: np.random.Generator) -> Instance:
    return Instance(workload.probabilities[chosen], workers, workload.step)


def stream(workload: Workload, workers: int, chosen: np.ndarray, rng: np.random.Generator) -> Instance:
    """Poisson arrivals; lives of mean 1 s, Gamma with shape 4."""
    begins = np.cumsum(rng.exponential(1 / STREAM[1], len(chosen)))
    ends = begins + rng.gamma(4, 1 / 4, len(chosen))
    return Instance(workload.probabilities[chosen], workers, workload.step, begin_s=begins, end_s=ends)


def measure(workload: Workload, profile: Profile, make: Any, workers: int, size: int, draw: int) -> dict[str, float]:
    """Mean TPOT in ms by policy, best known and bound, and the most requests on a worker by policy."""
    rng = np.random.default_rng([draw, workers, size])
    chosen = rng.choice(len(workload.requests), size, replace=size > len(workload.requests))
    instance = make(workload, workers, chosen, rng)
    requests = [replace(workload.requests[i], id=str(i)) for i in chosen]
    targets = [WorkerState(f"decode-{k}", f"decode-{k}") for k in range(workers)]
    assigned = {
        name: assign_by(
            make_policy(name, targets, profile=profile, trace=workload.calibration), instance, requests, rng
        )
        for name in POLICIES
    }
    most = math.ceil(SLACK * instance.heaviest(assigned["least_load"]))
    assigned["informed"] = one_by_one(instance, most)
    best = best_found(instance, most, starts=[assigned[name] for name in STARTS], rng=rng, tries=1)
    result = {name: 1000 * instance.mean_tpot_s(places) for name, places in assigned.items()}
    result |= {f"most {name}": float(instance.heaviest(places)) for name, places in assigned.items()}
    if instance.at_once and count_sets(size, most) <= MOST_SETS:
        proven = best_partition(instance, most, best)
        return result | {"best": 1000 * proven.mean_tpot_s, "bound": 1000 * proven.bound_s}
    return result | {"best": 1000 * instance.mean_tpot_s(best)}


def cases(draws: int) -> Iterator[dict[str, Any]]:
    for workload in workloads():
        profiles = {workers: fit(workload.calibration, workers) for workers in (8, 16)}
        shapes = [("batch", batch, *shape) for shape in SHAPES] + [("stream", stream, STREAM[0], STREAM[2])]
        for kind, make, workers, size in shapes:
            found = [measure(workload, profiles[workers], make, workers, size, draw) for draw in range(draws)]
            mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
            yield {"workload": workload.name, "kind": kind, "workers": workers, "requests": size, **summary(mean)}


def summary(mean: dict[str, float]) -> dict[str, Any]:
    base, best = mean["least_load"], mean["best"]
    return {
        "least_load_ms": base,
        "best_ms": best,
        "gain_percent": 100 * (1 - best / base),
        "gap_percent": 100 * (best / mean["bound"] - 1) if "bound" in mean else None,
        "share": {name: (base - mean[name]) / (base - best) for name in SHOWN},
        "most": {name: mean[f"most {name}"] for name in SHOWN},
    }


def as_lines(row: dict[str, Any]) -> Iterator[str]:
    gap = "no bound" if row["gap_percent"] is None else f"{row['gap_percent']:.2f} % above the bound"
    yield (
        f"{row['workload']}, {row['kind']} of {row['requests']} on {row['workers']}: least_load "
        f"{row['least_load_ms']:.2f} ms, best {row['best_ms']:.2f} ms ({-row['gain_percent']:.1f} %, {gap})"
    )
    for name, share in row["share"].items():
        yield f"    {name:14}{100 * share:7.0f} % of the gain, {row['most'][name]:5.1f} requests on the most loaded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2, help="of each case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    rows = []
    for row in cases(options.draws):
        rows.append(row)
        if not options.json:
            print("\n".join(as_lines(row)), flush=True)
    if options.json:
        print(json.dumps({"draws": options.draws, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
