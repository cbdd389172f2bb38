#!/usr/bin/env python3
"""What a changing mix, the loss of a worker and the join of two do to each decode policy.

    OMP_NUM_THREADS=1 python3 bench/drift.py [--policies a,b] [--trace tiny-moe] [--rate 90] [--seed 0] [--json]

Recorded outputs are replayed on a simulated 8P16D.  The profile is fitted to one half of the trace, and requests are
drawn from the other, evenly from its 8 domains unless the scenario says otherwise; at 40 s something happens, and
until 80 s requests go on arriving.  Of TPOT P50 in windows of 2.5 s, by the ends of the requests, which take about two
seconds each:

- `before`, `after`: median of the last six windows before the event, and of the run;
- `worst`: highest from the event on;
- `to least_load`: median of the ratio to least_load in the same window, over the last six of the run;
- `settled`: seconds from the event until no window's ratio is more than 15 % above that any more.  Both meet the
  same arrivals, so that their chance cancels out.

`failed` are requests that were at a lost worker, or were sent there before the loss was noticed (3 s).  All others that
arrived were finished; the script checks it.  `refits` were installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.latency import StepTime
from coterie.routing import DECODE_POLICIES, Shown, make_policy
from coterie.sim import Change, ClusterSpec, Drift, Mix, Population, Stream, population_of, simulate, windows
from coterie.sim.cluster import Cluster
from coterie.sim.timeline import Window

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from traces import coterie_tiny_trace, tiny_moe_trace

TRACES = {"coterie-tiny": coterie_tiny_trace, "tiny-moe": tiny_moe_trace}
WORKERS = 16
STEP = StepTime(fixed_s=2e-3, per_request_s=2e-5, per_expert_s=5e-5)
OUTPUT_TOKENS = 256
WARM_UP_S, EVENT_S, END_S = 15.0, 40.0, 80.0
WIDTH_S = 2.5
CALM = 6
WIDTHS = (8, 8, 8, 15, 11, 8, 8)


@dataclass(frozen=True)
class Scenario:
    """What happens at `EVENT_S`."""

    name: str
    drift: Drift
    changes: tuple[Change, ...] = ()
    absent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Run:
    """What came of a simulation."""

    scenario: str
    policy: str
    windows: tuple[Window, ...]
    requests: int
    failed: int
    refits: int


@dataclass(frozen=True)
class Felt:
    """How a policy felt it; times per token in ms."""

    scenario: str
    policy: str
    before_ms: float
    worst_ms: float
    after_ms: float
    to_least_load: float
    settled_s: float
    requests: int
    failed: int
    refits: int
    tpot_p50_ms: tuple[float | None, ...]


def scenarios(domains: list[str]) -> list[Scenario]:
    even = Mix(tuple((domain, 1.0) for domain in domains))
    two = Mix(tuple((domain, 1.0) for domain in domains[:2]))
    steady = Drift(((0.0, even),))
    late = ("decode-14", "decode-15")
    return [
        Scenario("two domains of eight", Drift(((0.0, even), (EVENT_S, two)))),
        Scenario("loss of 1 of 16", steady, (Change(EVENT_S, "decode-5", "lost"),)),
        Scenario("join of 2", steady, tuple(Change(EVENT_S, name, "joined") for name in late), frozenset(late)),
    ]


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    population: Population
    trace: ActivationTrace
    profile: Profile
    rate: float
    seed: int

    def run(self, scenario: Scenario, name: str) -> Run:
        """Simulate one policy in one scenario."""
        spec = ClusterSpec(8, WORKERS, step_time=STEP, absent=scenario.absent)
        policy = make_policy(name, spec.targets("decode"), profile=self.profile, trace=self.trace)
        seen: list[Cluster] = []
        simulate(
            self.population,
            Stream(self.rate, END_S),
            spec,
            prefill=make_policy("prefix", spec.targets("prefill")),
            decode=policy,
            seed=self.seed,
            drift=scenario.drift,
            changes=scenario.changes,
            warm_up_s=WARM_UP_S,
            on_end=seen.append,
        )
        census = seen[0].census()
        assert census.arrived == census.finished + census.failed, "a request was lost"
        figures = policy.figures(END_S) if isinstance(policy, Shown) else {}
        refits = int(figures.get("refits_installed_total", 0))
        return Run(scenario.name, name, windows(seen[0].outcomes, WIDTH_S), census.arrived, census.failed, refits)

    def compare(self, scenario: Scenario, names: list[str]) -> list[Felt]:
        """Simulate policies in one scenario, least_load first."""
        base = self.run(scenario, "least_load")
        return [felt(base, base), *(felt(self.run(scenario, name), base) for name in names)]


def felt(run: Run, base: Run) -> Felt:
    ends_s = np.array([window.start_s + WIDTH_S for window in run.windows])
    tpots, others = (np.array([window.tpot_p50_ms for window in one.windows], dtype=float) for one in (run, base))
    later, ratios = ends_s > EVENT_S, tpots / others
    ratio = float(np.median(ratios[-CALM:]))
    return Felt(
        run.scenario,
        run.policy,
        before_ms=float(np.median(tpots[~later][-CALM:])),
        worst_ms=float(tpots[later].max()),
        after_ms=float(np.median(tpots[-CALM:])),
        to_least_load=ratio,
        settled_s=float(max(ends_s[later & (ratios > 1.15 * ratio)] - EVENT_S, default=0.0)),
        requests=run.requests,
        failed=run.failed,
        refits=run.refits,
        tpot_p50_ms=tuple(window.tpot_p50_ms for window in run.windows),
    )


def halves(trace: ActivationTrace) -> tuple[ActivationTrace, ActivationTrace]:
    order = np.random.default_rng(0).permutation(len(trace))
    return trace.select(order[: len(order) // 2]), trace.select(order[len(order) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="domain,locality,locality_refit,locality_adaptive,marginal")
    parser.add_argument("--trace", choices=TRACES, default="tiny-moe")
    parser.add_argument("--rate", type=float, default=90.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON, with P50 of every window")
    options = parser.parse_args()
    names = [name for name in options.policies.split(",") if name != "least_load"]
    if unknown := sorted(set(names) - set(DECODE_POLICIES)):
        parser.error(f"unknown policies {', '.join(unknown)}; there are {', '.join(DECODE_POLICIES)}")
    fitted, asked = halves(TRACES[options.trace]())
    population = population_of(asked, output_tokens=OUTPUT_TOKENS)
    setting = Setting(population, asked, fit(fitted, WORKERS), options.rate, options.seed)
    found = [one for scenario in scenarios(sorted(set(asked.labels))) for one in setting.compare(scenario, names)]
    print(json.dumps([asdict(one) for one in found], indent=2) if options.json else as_table(found, options))


def as_table(found: list[Felt], options: argparse.Namespace) -> str:
    lines = [f"{options.trace}, 8P16D, {options.rate:g} requests/s, seed {options.seed}; TPOT P50 in ms"]
    titles = zip(("before", "worst", "after", "to least_load", "settled s", "failed", "refits"), WIDTHS, strict=True)
    head = " " * 22 + "".join(f"{title:>{width}}" for title, width in titles)
    for one in found:
        if one.policy == "least_load":
            lines += ["", f"{one.scenario} ({one.requests} requests)", head]
        lines.append(
            f"  {one.policy:20}{one.before_ms:8.2f}{one.worst_ms:8.2f}{one.after_ms:8.2f}"
            f"{one.to_least_load - 1:+15.1%}{one.settled_s:11.1f}{one.failed:8}{one.refits:8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
