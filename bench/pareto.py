#!/usr/bin/env python3
"""Which decode policies no other beats in median, tail and fairness at once.

    OMP_NUM_THREADS=1 python3 bench/pareto.py [--seeds 2] [--json] [--plot FILE.svg]

Five workloads on 8P16D: the made-up task and language mixes, and recorded outputs of tiny-moe replayed, evenly from its
8 domains, nine tenths from two of them, and one at a time for 10 s each; profiles are fitted to an even mix in all of
them.  Changes are in per cent against least_load with the same arrivals, mean over seeds:

- `P50`, `P99`: of time per output token;
- `worst`: the P50 of the domain that comes off worst (domains with a hundredth of the requests or more);
- `experts`: expert weights read per output token, which is what decoding costs in memory traffic and, as far as that
  goes, in energy.

A policy is on the front (*) if no other is as good in the first three and better in one.  `experts` is beside it: a
policy that crowds a few workers reads each expert for more tokens, and is slow.  `locality 0.02` has another tau.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.latency import QWEN3_30B_MI300X, StepTime
from coterie.routing import DECODE_POLICIES, make_policy
from coterie.sim import ClusterSpec, Drift, Mix, Population, Stream, population_of, simulate
from coterie.sim.made import made_workload
from coterie.sim.pareto import domain_medians_ms, front

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from traces import tiny_moe_trace

WORKERS = 16
RATE = 60
DURATION_S, WARM_UP_S = 60.0, 20.0
OUTPUT_TOKENS = 512
TAUS = (0.02, 0.3, 0.5)
BASE = "least_load"
POLICIES = (*(name for name in DECODE_POLICIES if name not in ("random", BASE)), *(f"locality {tau}" for tau in TAUS))
LATENCIES = ("P50", "P99", "worst")
FIGURES = (*LATENCIES, "experts")
RARE = 0.01


@dataclass(frozen=True)
class Workload:
    """Requests and when they come from which domains.

    Attributes:
        name: in the table.
        population: to draw from.
        calibration: labelled, to fit profiles to.
        step: step time.
        drift: of the domains; each request equally often without.
    """

    name: str
    population: Population
    calibration: ActivationTrace
    step: StepTime
    drift: Drift | None = None


def workloads() -> Iterator[Workload]:
    for name in ("task", "language"):
        made = made_workload(name)
        yield Workload(f"made-up {name}", made.population, made.calibration, made.step_time)
    trace = tiny_moe_trace()
    step = replace(QWEN3_30B_MI300X, per_expert_s=QWEN3_30B_MI300X.per_expert_s * 48 / trace.geometry.layers)
    served = population_of(trace.select(np.arange(1, len(trace), 2)), output_tokens=OUTPUT_TOKENS)
    names = sorted(set(trace.labels))
    skewed = Mix(tuple((name, 4.5 if i < 2 else 1 / 6) for i, name in enumerate(names)))
    turns = Drift(tuple((10.0 * i, Mix(((names[i % len(names)], 1.0),))) for i in range(6)))
    for kind, drift in (("even", None), ("two domains", Drift(((0.0, skewed),))), ("one at a time", turns)):
        yield Workload(f"tiny-moe, {kind}", served, trace.select(np.arange(0, len(trace), 2)), step, drift)


def run(workload: Workload, profile: Profile, name: str, seed: int) -> dict[str, Any]:
    """Figures of one run; the medians of the domains by name."""
    spec = ClusterSpec(8, WORKERS, step_time=workload.step)
    policy, _, tau = name.partition(" ")
    targets = spec.targets("decode")
    decode = make_policy(
        policy, targets, profile=profile, trace=workload.calibration, **({"tau": float(tau)} if tau else {})
    )
    shown: dict[str, Any] = {}

    def look(cluster: Any) -> None:
        shown["domains"] = domain_medians_ms(cluster.outcomes, workload.population)
        labels = [workload.population.requests[i].domain for i in cluster.outcomes.position]
        shown["shares"] = {label: count / len(labels) for label, count in Counter(labels).items()}

    row = simulate(
        workload.population,
        Stream(RATE, DURATION_S),
        spec,
        prefill=make_policy("prefix", spec.targets("prefill")),
        decode=decode,
        seed=seed,
        drift=workload.drift,
        warm_up_s=WARM_UP_S,
        on_end=look,
    )
    experts = row.active_experts_mean / row.batch_mean
    return {"P50": row.tpot_p50_ms, "P99": row.tpot_p99_ms, "experts": experts, **shown}


def compared(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(runs, base, strict=True))
    change = {name: mean_change([(a[name], b[name]) for a, b in pairs]) for name in ("P50", "P99", "experts")}
    often = [name for name, share in base[0]["shares"].items() if share >= RARE]
    domains = {name: mean_change([(a["domains"][name], b["domains"][name]) for a, b in pairs]) for name in often}
    return {**change, "worst": max(domains.values()), "domains": domains}


def mean_change(pairs: list[tuple[float, float]]) -> float:
    return float(np.mean([100 * (a / b - 1) for a, b in pairs]))


def measure(workload: Workload, seeds: int) -> list[dict[str, Any]]:
    profile = fit(workload.calibration, WORKERS)
    base = [run(workload, profile, BASE, seed) for seed in range(seeds)]
    rows = [{"workload": workload.name, "policy": BASE, **compared(base, base)}]
    for name in POLICIES:
        runs = [run(workload, profile, name, seed) for seed in range(seeds)]
        rows.append({"workload": workload.name, "policy": name, **compared(runs, base)})
    on_front = front(np.array([[row[figure] for figure in LATENCIES] for row in rows]))
    return [{**row, "front": bool(one)} for row, one in zip(rows, on_front, strict=True)]


def plot(path: str, rows: list[dict[str, Any]]) -> None:
    """P50 and P99 of each policy, a panel for each workload, those on the front filled."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(4 * len(names), 4), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        for row in (row for row in rows if row["workload"] == name):
            axes.plot(row["P50"], row["P99"], "o", color="#2563a8", fillstyle="full" if row["front"] else "none")
            axes.annotate(
                row["policy"], (row["P50"], row["P99"]), fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
        axes.set(title=name, xlabel="P50, % against least_load", ylabel="P99, % against least_load")
        axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="paired runs of each case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw P50 and P99 to this file (needs matplotlib)")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(f"{'workload':26}{'policy':18}" + "".join(f"{name:>9}" for name in FIGURES) + "  worst domain")
    for workload in workloads():
        found = measure(workload, options.seeds)
        rows += found
        if not options.json:
            print("\n".join(as_line(row) for row in found), flush=True)
    if options.json:
        print(json.dumps({"seeds": options.seeds, "rate": RATE, "rows": rows}, indent=2))
    if options.plot:
        plot(options.plot, rows)


def as_line(row: dict[str, Any]) -> str:
    worst = max(row["domains"], key=row["domains"].get)
    cells = "".join(f"{row[name]:+9.1f}" for name in FIGURES)
    return f"{row['workload']:26}{row['policy']:18}{cells}  {worst}{'  *' if row['front'] else ''}"


if __name__ == "__main__":
    main()
