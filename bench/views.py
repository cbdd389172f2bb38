#!/usr/bin/env python3
"""What several gateways lose that know of each other late, in part or never.

    OMP_NUM_THREADS=1 python3 bench/views.py [--gateways 2,4] [--cell A] [--rate 60] [--seeds 4] [--json]
    python3 bench/views.py --real [--gateways 2,4] [--exchange 0.4,1,4] [--rate 60] [--for-s 30]: see `real_views.py`

Cells with their clusters are those of `bench/policies.py`, with outputs of 512 tokens.  Each request comes to one of G
gateways by chance, each with a ledger and policies of its own; what one does the others know after a delay.  `+ use`
means that they then know what requests use, too; else load alone.  For each policy, TPOT P50 and P99 and their change
against one gateway with the same policy in pairs of seeds (mean, and the 95 % interval of the mean); and how many
requests the view of a worker is off, mean over gateways, workers and four looks a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import real_views
from policies import FULL_TOKENS, LIFE_S, cell

from coterie.routing import make_policy
from coterie.sim import Stream
from coterie.sim.cluster import Cluster
from coterie.sim.kernel import Kernel
from coterie.sim.paired import paired_change
from coterie.sim.result import sum_up
from coterie.sim.workload import arrivals

DELAYS_S = (0.0, 0.1, 1.0, 5.0, None)
POLICIES = ("marginal + use", "marginal", "locality", "least_load", "power_of_two")
LOOK_S = 0.25
"""From one look at the views to the next."""


@dataclass(frozen=True)
class Setup:
    """What is simulated: the policy, the gateways, and the delay of their views; None for never."""

    policy: str
    gateways: int
    delay_s: float | None


@dataclass(frozen=True)
class Run:
    """TPOT in ms, and by how many requests views were off."""

    setup: Setup
    seed: int
    p50: float
    p99: float
    error: float


def run(name: str, rate: int, setup: Setup, seed: int, requests: int) -> Run:
    of = cell(name, FULL_TOKENS)
    policy, _, use = setup.policy.partition(" + ")
    spec = replace(of.spec, gateways=setup.gateways, exchange_s=setup.delay_s, exchange_batches=bool(use))
    kernel, warm_up_s = Kernel(), 1.5 * LIFE_S
    cluster = Cluster(
        kernel,
        spec,
        of.population.experts,
        prefill=make_policy("prefix", spec.targets("prefill")),
        decode=make_policy(policy, spec.targets("decode"), profile=of.profile, trace=of.trace),
        seed=seed,
        warm_up_s=warm_up_s,
    )
    until_s = warm_up_s + requests / rate
    errors: list[float] = []

    def look() -> None:
        if warm_up_s < kernel.now() < until_s:
            errors.append(cluster.view_error("decode"))

    kernel.every(LOOK_S, look)
    cluster.feed(arrivals(of.population, Stream(rate, until_s), seed))
    kernel.run()
    row = sum_up(cluster, of.population.experts.geometry.layers, policy=policy, rate=rate, seed=seed)
    assert row.tpot_p50_ms is not None
    assert row.tpot_p99_ms is not None
    return Run(setup, seed, row.tpot_p50_ms, row.tpot_p99_ms, sum(errors) / len(errors))


def setups(gateways: Sequence[int]) -> list[Setup]:
    """One gateway first, with each policy; then all that several may know of each other."""
    alone = [Setup(policy, 1, 0.0) for policy in dict.fromkeys(policy.partition(" + ")[0] for policy in POLICIES)]
    several = [
        Setup(policy, count, delay_s)
        for count, policy, delay_s in product(gateways, POLICIES, DELAYS_S)
        if not (delay_s is None and "+" in policy)
    ]
    return alone + several


def as_table(runs: Sequence[Run]) -> str:
    lines = [f"{'policy':16}{'gateways':>9}{'delay':>7}{'P50 ms':>8}{'P99 ms':>8}{'P50 %':>18}{'P99 %':>18}{'off':>7}"]
    by_setup: dict[Setup, list[Run]] = {}
    for one in runs:
        by_setup.setdefault(one.setup, []).append(one)
    for setup, found in by_setup.items():
        alone = by_setup[Setup(setup.policy.partition(" + ")[0], 1, 0.0)]
        delay = "never" if setup.delay_s is None else f"{setup.delay_s:g} s"
        p50, p99, off = (sum(getattr(one, name) for one in found) / len(found) for name in ("p50", "p99", "error"))
        changes = [change([getattr(one, name) for one in each] for each in (found, alone)) for name in ("p50", "p99")]
        lines.append(
            f"{setup.policy:16}{setup.gateways:>9}{delay:>7}{p50:>8.2f}{p99:>8.2f}{changes[0]:>18}{changes[1]:>18}{off:>7.2f}"
        )
    return "\n".join(lines)


def change(values: Iterable[list[float]]) -> str:
    found = paired_change(*values)
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", default="2,4")
    parser.add_argument("--cell", default="task-qwen")
    parser.add_argument("--rate", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=3000, help="after the warm-up, in each run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--real", action="store_true", help="real gateways on mock workers instead (needs gcc)")
    parser.add_argument("--exchange", default="0.4,1,4", metavar="S,...", help="of those, in seconds")
    parser.add_argument("--for-s", type=float, default=30, help="how long those serve in each run")
    args = parser.parse_args()
    counts = [int(count) for count in args.gateways.split(",")]
    if args.real:
        exchanges_s = [float(each) for each in args.exchange.split(",")]
        real = real_views.measure(counts, exchanges_s, args.rate, args.for_s)
        print(json.dumps([asdict(one) for one in real]) if args.json else real_views.as_table(real))
        return
    each = product(setups(counts), range(args.seeds))
    runs = [run(args.cell, args.rate, setup, seed, args.requests) for setup, seed in each]
    print(json.dumps([asdict(one) for one in runs]) if args.json else as_table(runs))


if __name__ == "__main__":
    main()
