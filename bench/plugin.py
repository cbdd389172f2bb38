#!/usr/bin/env python3
"""CPU time inside the plugin's hooks as a share of the engine's CPU time, on real vLLM.

    python3 bench/plugin.py [--rounds 5] [--json]

One vLLM server with the counts connector and the small MoE of the tests; four loads, interleaved over the
rounds.  The hooks' time is the engine's own metric `coterie_plugin_hook_cpu_seconds_total`; the engine's time is
that of its core process (scheduler and model in one process, so no waiting loop between them counts as work).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from coterie.up.server import vllm_server

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "coterie-tiny"
COUNTS = json.dumps(
    {
        "kv_connector": "CountsConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "coterie.vllm_plugin.connector",
    }
)
FLUSH_S = 1.2  # the plugin reports once a second, with the first step after it is due
BAR = 0.03


def complete(url: str, number: int, words: int, tokens: int, params: dict[str, object] | None = None) -> None:
    """One request whose prompt no other request shares."""
    prompt = f"{number} " + "def f(x):\n    return x\n" * words
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if params:
        body["kv_transfer_params"] = params
    httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False).raise_for_status()


def decode(url: str, first: int) -> None:
    """32 requests of 96 output tokens, 8 at a time."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: complete(url, first + n, 8, 96), range(32)))


def prefill(url: str, first: int) -> None:
    """64 prompts of about 300 tokens whose counts are returned, 8 at a time."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: complete(url, first + n, 40, 1, {"do_remote_decode": True}), range(64)))


def calibration(url: str, first: int, asked: str = "counts") -> None:
    """16 requests as `coterie collect` sends them: prompt and output counts."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: complete(url, first + n, 20, 48, {"coterie": asked}), range(16)))


def ids(url: str, first: int) -> None:
    """The same with the ids of output tokens, as `coterie collect --ids`."""
    calibration(url, first, "counts+ids")


LOADS: dict[str, Callable[[str, int], None]] = {
    "decode": decode,
    "prefill": prefill,
    "calibration": calibration,
    "ids": ids,
}


def hook_seconds(url: str) -> float:
    """The plugin's own counter, after a step that makes it report."""
    time.sleep(FLUSH_S)
    complete(url, 0, 1, 2)
    lines = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("coterie_plugin_hook_cpu_seconds_total")
    )


def core_seconds(group: int) -> float:
    """CPU seconds of the engine's core process, from `/proc`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "cmdline").read_bytes()
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and name.startswith(b"VLLM::EngineCore"):
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise SystemExit("no engine core process found")


def measure(url: str, group: int, rounds: int) -> list[dict[str, object]]:
    """One row per load: the share in each round, its median and range."""
    shares: dict[str, list[float]] = {name: [] for name in LOADS}
    for load in LOADS.values():  # warm up
        load(url, 10**6)
    for number in range(rounds):
        for position, (name, load) in enumerate(LOADS.items()):
            hooks, core = hook_seconds(url), core_seconds(group)
            load(url, 1000 * (len(LOADS) * number + position + 1))
            used = core_seconds(group) - core
            shares[name].append((hook_seconds(url) - hooks) / used)
            print(f"round {number + 1}/{rounds} {name:12s} {shares[name][-1]:.2%}", flush=True)
    return [
        {"load": name, "share_median": statistics.median(all_), "share_min": min(all_), "share_max": max(all_)}
        for name, all_ in shares.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result as JSON at the end")
    options = parser.parse_args()
    env = Path(os.environ.get("COTERIE_VLLM_ENV") or ROOT / ".venv-vllm").absolute()
    with (
        tempfile.TemporaryDirectory() as folder,
        vllm_server(env, MODEL, COUNTS, Path(folder) / "log") as (url, server),
    ):
        assert server.pid is not None
        rows = measure(url, server.pid, options.rounds)
    print(
        f"\n{'load':12s} {'median':>8s} {'min':>8s} {'max':>8s}   share of the engine core's CPU time (bar {BAR:.0%})"
    )
    for row in rows:
        print(f"{row['load']:12s} {row['share_median']:8.2%} {row['share_min']:8.2%} {row['share_max']:8.2%}")
    if options.json:
        print(json.dumps({"rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
