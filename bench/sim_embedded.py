#!/usr/bin/env python3
"""What the simulator foretells of a real cluster: the demo's 1 prefill and 4 decode workers of the embedded engine.

    python3 bench/sim_embedded.py [--requests 96] [--rounds 2] [--json FILE]

1. Records which experts the prompts use, token by token, and fits a profile to other prompts.
2. Serves calibration rounds of several sizes under round robin, of mixed prompts and of one domain; the decode workers
   write their steps down, and a step time is fitted.
3. Serves rounds of requests sent at once under each policy, and simulates the same requests with that step time.

Nothing of the rounds of step 3 is used for their predictions.  Step times are by the clock: on a machine with fewer
cores than workers they hold what the workers take from one another while all of them are busy, as they are in such a
round.  Active experts and batches are the workers' own counters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.prompts import Prompt, read_prompts
from coterie.calibration.sources.plugin import PluginSource
from coterie.cli.up import default_engine_env
from coterie.latency import StepPoint, StepTime, TokenTime, fit_step_time, mean_error, read_step_points
from coterie.routing import make_policy
from coterie.sim import ClusterSpec, Population, RecordedTimes, population_of, simulate
from coterie.sim.workload import arrivals
from coterie.up.cluster import Cluster, Member
from coterie.up.config import load_cluster_config
from coterie.up.demo.client import Served, serve_all
from coterie.up.demo.counters import Counters, Watch

DEMO = Path(__file__).parent.parent / "examples" / "demo"
POLICIES = ("round_robin", "least_load", "locality")
EACH = 24
OUTPUT_TOKENS = 48
SIZES = (8, 24, 48, 96)
FIGURES = ("tpot_p50_ms", "tpot_p99_ms", "active_experts_mean", "batch_mean")


@dataclass(frozen=True)
class Figures:
    """Of one run, measured or simulated."""

    tpot_p50_ms: float
    tpot_p99_ms: float
    active_experts_mean: float
    batch_mean: float


class Reporter:
    """Says little."""

    def begin(self, total: int, done: int) -> None:
        """See `calibration.collect.Reporter`."""
        print(f"collecting {total} prompts", flush=True)

    def advance(self) -> None:
        """See `calibration.collect.Reporter`."""

    def notice(self, text: str) -> None:
        """See `calibration.collect.Reporter`."""
        print(text, flush=True)


# --- before ----------------------------------------------------------------------------------------------


def start_cluster(folder: Path, steps: Path) -> Cluster:
    config = load_cluster_config(DEMO / "embedded.yaml", engine_env=default_engine_env())
    decode = replace(config.decode, args=(*config.decode.args, "--log-steps", str(steps)))
    return Cluster(replace(config, decode=decode, run_dir=folder, gateway=None))


def served_prompts(folder: Path) -> Path:
    """The first prompts of each label, in a file of their own."""
    left: dict[str, int] = defaultdict(lambda: EACH)
    lines = []
    for line in (DEMO / "serve.jsonl").read_text(encoding="utf-8").splitlines():
        label = json.loads(line)["label"]
        left[label] -= 1
        if left[label] >= 0:
            lines.append(line)
    path = folder / "served.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def collect(cluster: Cluster, prompts: Path, folder: Path, max_tokens: int) -> ActivationTrace:
    client = EngineClient(cluster.prefill_urls[0], notice=print)
    source = PluginSource(client, cluster.config.served_model_name, ids=True)
    options = CollectOptions(prompts, folder / f"{prompts.stem}.trace", max_tokens, concurrency=32, force=True)
    return asyncio.run(run_collect(source, options, Reporter()))


def start_gateways(cluster: Cluster, profile: Profile, folder: Path) -> dict[str, Member]:
    profile.save(folder / "bench.profile")
    needs = {"locality": {"profile": str(folder / "bench.profile")}}
    return {
        policy: cluster.start_gateway({"decode_policy": policy, **needs.get(policy, {})}, name=f"gateway-{policy}")
        for policy in POLICIES
    }


# --- measured --------------------------------------------------------------------------------------------


def serve(cluster: Cluster, url: str, prompts: Sequence[Prompt], tokens: int = OUTPUT_TOKENS) -> list[Served]:
    """All at once."""
    asked = [(str(number), prompt) for number, prompt in enumerate(prompts)]
    model = cluster.config.served_model_name
    many = len(asked)
    served = asyncio.run(serve_all(url, model, asked, max_tokens=tokens, concurrency=many, advance=lambda: None))
    failed = [one.error for one in served if one.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0]}")
    return served


def counters(cluster: Cluster) -> Counters:
    async def read() -> Counters | None:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            return await Watch(client, cluster.decode_urls).read()

    found = asyncio.run(read())
    assert found, "embedded engines count"
    return found


def measure(cluster: Cluster, url: str, prompts: Sequence[Prompt]) -> Figures:
    before = counters(cluster)
    served = serve(cluster, url, prompts)
    counted = counters(cluster) - before
    return Figures(*tpots_ms(served), counted.active / counted.steps, counted.rows / counted.steps)


def tpots_ms(served: Sequence[Served]) -> tuple[float, float]:
    tpots = [1000 * one.timeline.tpot_s for one in served if one.timeline and one.timeline.tpot_s is not None]
    return float(np.percentile(tpots, 50)), float(np.percentile(tpots, 99))


def calibrate(cluster: Cluster, url: str, prompts: Sequence[Prompt]) -> None:
    """Rounds in which batch and active experts vary by themselves."""
    for size in SIZES:
        serve(cluster, url, prompts[:: len(prompts) // size][:size])
    for label in sorted({prompt.label for prompt in prompts})[:4]:
        serve(cluster, url, [prompt for prompt in prompts if prompt.label == label])


def prefill_time(cluster: Cluster, prompts: Sequence[Prompt], tokens: Sequence[int]) -> TokenTime:
    """Of prompts in the prefix cache, all at once; by the token, though a cached prompt costs only its last block."""
    began_s = time.monotonic()
    serve(cluster, cluster.prefill_urls[0], prompts, 1)
    return TokenTime(0.0, (time.monotonic() - began_s) / sum(tokens))


# --- the comparison --------------------------------------------------------------------------------------


def foretell(
    population: Population, requests: int, spec: ClusterSpec, policy: str, profile: Profile, seed: int
) -> Figures:
    decode = make_policy(policy, spec.targets("decode"), profile=profile)
    prefill = make_policy("prefix", spec.targets("prefill"))
    at_once = RecordedTimes((0.0,) * requests)
    row = simulate(population, at_once, spec, prefill=prefill, decode=decode, seed=seed)
    return Figures(*(getattr(row, name) for name in FIGURES))


def mean(rounds: Sequence[Figures]) -> dict[str, float]:
    return {name: statistics.fmean(getattr(one, name) for one in rounds) for name in FIGURES}


def measured_steps(file: Path) -> tuple[StepTime, dict[str, float]]:
    steps = read_step_points(file)
    points = means_of(steps)
    step_time = fit_step_time(points)
    return step_time, {**asdict(step_time), "steps": len(steps), "mean_error": mean_error(step_time, points)}


def means_of(steps: Sequence[StepPoint]) -> list[StepPoint]:
    """Steps that are alike, drawn together.

    A step that waited for a core takes several times as long as another, and relative errors over single steps would
    pull the fit to the quick ones.
    """
    alike: dict[tuple[float, float], list[StepPoint]] = defaultdict(list)
    for step in steps:
        alike[step.requests, step.active // 10].append(step)
    return [
        StepPoint(
            *(statistics.fmean(getattr(step, name) for step in some) for name in ("requests", "active", "step_s"))
        )
        for some in alike.values()
        if len(some) >= 5
    ]


def compare(cluster: Cluster, folder: Path, steps: Path, options: argparse.Namespace) -> dict:
    profile = fit(collect(cluster, DEMO / "calibrate.jsonl", folder, 20), 4)
    file = served_prompts(folder)
    trace = collect(cluster, file, folder, OUTPUT_TOKENS)
    population, prompts = population_of(trace), read_prompts(file).prompts
    gateways = start_gateways(cluster, profile, folder)
    print("calibrating step times", flush=True)
    calibrate(cluster, gateways["round_robin"].url, prompts)
    step_time, about = measured_steps(steps)
    prefill = prefill_time(cluster, prompts, trace.prefill_tokens.tolist())
    spec = ClusterSpec(
        1,
        4,
        step_time=step_time,
        prefill_time=prefill,
        handoff_time=TokenTime(0.0, 0.0),
        prefill_budget_tokens=512,
        batch_requests=64,
    )
    found: dict[str, list[Figures]] = defaultdict(list)
    told: dict[str, list[Figures]] = defaultdict(list)
    for seed in range(options.rounds):
        order = [one.position for one in arrivals(population, RecordedTimes((0.0,) * options.requests), seed)]
        for policy in POLICIES if seed % 2 == 0 else reversed(POLICIES):
            print(f"round {seed + 1} under {policy}", flush=True)
            found[policy].append(measure(cluster, gateways[policy].url, [prompts[i] for i in order]))
            told[policy].append(foretell(population, options.requests, spec, policy, profile, seed))
    rows = [{"policy": one, "measured": mean(found[one]), "simulated": mean(told[one])} for one in POLICIES]
    return {"requests": options.requests, "rounds": options.rounds, "step_time": about, "rows": rows}


def as_table(report: dict) -> str:
    step = report["step_time"]
    title = (
        f"{report['rounds']} rounds of {report['requests']} requests at once; step: {1e3 * step['fixed_s']:.3g} ms + "
        f"{1e6 * step['per_request_s']:.3g} us x requests + {1e6 * step['per_expert_s']:.3g} us x active experts; mean "
        f"error {step['mean_error']:.1%} over means of {step['steps']} steps"
    )
    lines = [title, "", f"{'':12}" + "".join(f"{name:>32}" for name in FIGURES)]
    lines += [f"{'policy':12}" + f"{'measured simulated   error':>32}" * len(FIGURES)]
    first = report["rows"][0]
    for row in report["rows"]:
        lines.append(f"{row['policy']:12}" + "".join(f"{cell(row, name):>32}" for name in FIGURES))
    lines += ["", f"{'change':12}" + f"{'measured simulated':>32}" * len(FIGURES)]
    for row in report["rows"][1:]:
        lines.append(f"{row['policy']:12}" + "".join(f"{change(row, first, name):>32}" for name in FIGURES))
    return "\n".join([*lines, f"change: against {first['policy']}"])


def cell(row: dict, name: str) -> str:
    found, told = row["measured"][name], row["simulated"][name]
    return f"{found:.2f}{told:10.2f}{told / found - 1:8.1%}"


def change(row: dict, first: dict, name: str) -> str:
    found, told = (row[kind][name] / first[kind][name] - 1 for kind in ("measured", "simulated"))
    return f"{found:+.1%}{told:+10.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96, help="of a round, sent at once")
    parser.add_argument("--rounds", type=int, default=2, help="of each policy")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--steps", type=Path, help="keep the measured steps in this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, steps = Path(scratch), options.steps or Path(scratch) / "steps.csv"
        with start_cluster(folder, steps) as cluster:
            report = compare(cluster, folder, steps, options)
    print(as_table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
