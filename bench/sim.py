#!/usr/bin/env python3
"""What a simulation costs: 12,000 requests of 512 output tokens on 8P16D, a model of 48 layers of 128 experts, top-8.

    OMP_NUM_THREADS=1 python3 bench/sim.py [--json]

The requests are made up: each domain favours its own experts, as a trained model does.  CPU time of the whole process,
the making of requests and profile left out.  Memory is the most that Python held at once beyond what the population
takes (measured in a run of its own, which is slower), for two lengths of the same traffic.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from dataclasses import replace

import numpy as np

from coterie.activations import ActivationTrace, TraceRecord, build_trace
from coterie.calibration import Profile, fit
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.routing import make_policy
from coterie.sim import ClusterSpec, Population, Row, Stream, population_of, simulate
from coterie.wire import count_ids

GEOMETRY = ModelGeometry(layers=48, experts=128, top_k=8)
SPEC = ClusterSpec(8, 16)
REQUESTS = 240
DOMAINS = 20
PROMPT_TOKENS = 48
RECORDED_TOKENS = 64
OUTPUT_TOKENS = 512
RATE = 100
DURATION_S = 120
POLICIES = ("least_load", "locality")


def tokens(rng: np.random.Generator, affinity: np.ndarray, count: int) -> np.ndarray:
    """`[count, L, top_k]` ids of tokens that choose by `affinity` plus noise: the Gumbel trick, without replacement."""
    noise = rng.gumbel(size=(count, GEOMETRY.layers, GEOMETRY.experts))
    return np.argpartition(affinity + noise, -GEOMETRY.top_k, axis=-1)[..., -GEOMETRY.top_k :].astype(np.uint8)


def made_up_trace() -> ActivationTrace:
    rng = np.random.default_rng(0)
    affinities = 2 * rng.normal(size=(DOMAINS, GEOMETRY.layers, GEOMETRY.experts))
    records = []
    for i in range(REQUESTS):
        prompt, output = (tokens(rng, affinities[i % DOMAINS], count) for count in (PROMPT_TOKENS, RECORDED_TOKENS))
        counts = [
            ExpertCounts(GEOMETRY, count_ids(ids, GEOMETRY.experts), len(ids), len(ids)) for ids in (prompt, output)
        ]
        label = f"domain {i % DOMAINS}"
        records.append(TraceRecord(*counts, RECORDED_TOKENS + 1, prompt_hash([i]), label, decode_ids=output))
    return build_trace("made-up", records)


def run(population: Population, name: str, profile: Profile, duration_s: float) -> Row:
    prefill = make_policy("prefix", SPEC.targets("prefill"))
    decode = make_policy(name, SPEC.targets("decode"), profile=profile)
    return simulate(population, Stream(RATE, duration_s), SPEC, prefill=prefill, decode=decode)


def measure_run(population: Population, name: str, profile: Profile) -> dict[str, float | None]:
    started = time.process_time()
    row = run(population, name, profile, DURATION_S)
    return {
        "cpu_s": time.process_time() - started,
        "requests": row.requests,
        "decode_steps": row.decode_steps,
        "batch_mean": row.batch_mean,
        "active_experts_mean": row.active_experts_mean,
    }


def measure_memory(population: Population, profile: Profile, duration_s: float) -> dict[str, float]:
    tracemalloc.start()
    row = run(population, "least_load", profile, duration_s)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"requests": row.requests, "peak_kib": most / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    trace = made_up_trace()
    profile = fit(trace, SPEC.decode)
    populations = {
        "replayed": population_of(trace, output_tokens=OUTPUT_TOKENS),
        "expected": population_of(replace(trace, decode_ids=None), output_tokens=OUTPUT_TOKENS),
    }
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "runs": {
            f"{kind}, {name}": measure_run(population, name, profile)
            for kind, population in populations.items()
            for name in POLICIES
        },
        "memory": {
            f"{duration_s} s": measure_memory(populations["expected"], profile, duration_s) for duration_s in (20, 80)
        },
    }
    print(json.dumps(report, indent=2) if as_json else as_table(report))


def as_table(report: dict) -> str:
    runs = report["runs"]
    columns = list(next(iter(runs.values())))
    lines = [report["machine"], f"{GEOMETRY}, {RATE} requests/s for {DURATION_S} s", ""]
    lines += [f"{'':24}" + "".join(f"{column:>22}" for column in columns)]
    lines += [f"{name:24}" + "".join(f"{one[column]:22.2f}" for column in columns) for name, one in runs.items()]
    lines += ["", "memory"]
    lines += [
        f"  {name:10}{one['requests']:8} requests{one['peak_kib']:10.0f} KiB" for name, one in report["memory"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
