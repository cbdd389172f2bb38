"""CPU and latency of the gateway on mock workers, beside vllm-router where it is installed.

    python bench/gateway.py [--vllm-router PATH] [--processes N] [--rounds 5] [--loads one two 64] [--json FILE]

The workers and the load generator are small C programs, so that they are never the bottleneck.  All contenders
run in the same rounds, one after another; the table gives medians, with the lowest and highest round.
CPU is that of the contender's processes alone, from /proc.  The gateway runs in the interpreter that runs this, and how
that was built matters: see docs/gateway.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from make_bodies import EXPERTS, LAYERS, TOP_K
from make_bodies import main as make_bodies
from processes import family_cpu_s, free_ports, started

from coterie.calibration import Profile
from coterie.core import ModelGeometry
from coterie.gateway.server import allow_descriptors
from coterie.signature import SignatureTransform

HERE = Path(__file__).parent
DECODES = 2
TOKENS = 256


@dataclass(frozen=True)
class Load:
    """One kind of load."""

    name: str
    body: str
    concurrency: int
    requests: int
    token_us: int


LOADS = {
    # the prefill worker has the only token when the prompt is done, so coterie asks no decode worker
    "one": [Load("one token, c=2", "one.json", 2, 4000, 0), Load("one token, c=32", "one.json", 32, 10000, 0)],
    "two": [Load("two tokens, c=2", "whole.json", 2, 4000, 0), Load("two tokens, c=32", "whole.json", 32, 10000, 0)],
    "64": [Load("64 streams", "stream.json", 64, 128, 20000)],
    "512": [Load("512 streams", "short.json", 512, 1024, 100_000)],
    "2048": [Load("2048 streams", "short.json", 2048, 4096, 400_000)],
}


def build(folder: Path) -> None:
    for name in ("mock", "lg"):
        subprocess.run(["gcc", "-O2", "-w", "-o", folder / name, HERE / f"{name}.c"], check=True)
    make_bodies(folder)


def write_profile(file: Path) -> None:
    """A profile of the mock's geometry, with random centroids: what locality costs does not depend on them."""
    geometry = ModelGeometry(LAYERS, EXPERTS, TOP_K)
    transform = SignatureTransform(geometry, tuple(range(LAYERS)), idf=np.ones((LAYERS, EXPERTS), np.float32))
    rng = np.random.default_rng(0)
    centroids = rng.random((DECODES, LAYERS * EXPERTS)).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    sizes, no_labels = np.ones(DECODES, np.int64), np.zeros((DECODES, 0), np.int64)
    Profile("tiny", transform, centroids, sizes, (), no_labels, trace_digest="0" * 64, seed=0, cohesion=1.0).save(file)


@contextlib.contextmanager
def workers(folder: Path, token_us: int) -> Iterator[list[int]]:
    ports = free_ports(1 + DECODES)
    with contextlib.ExitStack() as stack:
        for i, port in enumerate(ports):
            role = ["-m", "decode", "-d", str(token_us)] if i else ["-m", "prefill", "-r", str(folder / "reply.json")]
            command = [str(folder / "mock"), "-p", str(port), *role]
            stack.enter_context(started(command, port, folder / "mock.log"))
        yield ports


def command_of(contender: str, folder: Path, ports: list[int], port: int, router: str | None) -> list[str]:
    prefill, *decodes = [f"http://127.0.0.1:{worker}" for worker in ports]
    urls = ["--prefill", prefill, *(part for url in decodes for part in ("--decode", url))]
    (side,) = free_ports(1)
    if contender == "vllm-router":
        flags = ["--vllm-pd-disaggregation", *urls, "--policy", "round_robin", "--log-level", "error"]
        return [str(router), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(side), *flags]
    serve = [sys.executable, "-m", "coterie", "serve", "--port", str(port), "--admin-port", str(side), *urls]
    policy, *flags = contender.removeprefix("coterie ").split()
    return [*serve, *flags, "--decode-policy", policy, "--profile", str(folder / "profile.safetensors")]


def generate(folder: Path, load: Load, port: int, requests: int) -> dict[str, Any]:
    body = str(folder / load.body)
    command = [str(folder / "lg"), "-p", str(port), "-c", str(load.concurrency), "-n", str(requests), "-f", body]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if result["errs"] or result["non200"] or result["n"] != requests:
        raise SystemExit(f"{load.name}: {result}")
    return result


def measure(folder: Path, load: Load, port: int, pid: int | None) -> dict[str, float]:
    generate(folder, load, port, min(load.requests // 4, 500) or 1)
    before = family_cpu_s(pid) if pid else 0.0
    result = generate(folder, load, port, load.requests)
    spent_s = family_cpu_s(pid) - before if pid else 0.0
    row = {"p50_ms": result["p50"], "p99_ms": result["p99"], "requests_per_s": result["rps"]}
    if load.token_us:
        row = {"gap_p999_ms": result["gap999"], "gap_max_ms": result["gapmax"], "ttft_p50_ms": result["ttf50"]}
        return {"cpu_us_per_chunk": spent_s * 1e6 / result["chunks"], **row}
    return {"cpu_s_per_1000": spent_s * 1000 / load.requests, **row}


def run_round(
    folder: Path, contenders: list[str], names: list[str], router: str | None
) -> Iterator[tuple[str, str, dict[str, float]]]:
    for loads in (LOADS[name] for name in names):
        with workers(folder, loads[0].token_us) as ports:
            for contender in contenders:
                if contender == "direct":
                    yield from ((contender, load.name, measure(folder, load, ports[1], None)) for load in loads)
                    continue
                (port,) = free_ports(1)
                command = command_of(contender, folder, ports, port, router)
                with started(command, port, folder / "contender.log") as process:
                    yield from ((contender, load.name, measure(folder, load, port, process.pid)) for load in loads)


def summarise(rows: list[tuple[str, str, dict[str, float]]]) -> list[dict[str, Any]]:
    table: dict[tuple[str, str], dict[str, list[float]]] = {}
    for contender, load, values in rows:
        for name, value in values.items():
            table.setdefault((load, contender), {}).setdefault(name, []).append(value)
    return [
        {"load": load, "contender": contender, **{name: summary(values) for name, values in columns.items()}}
        for (load, contender), columns in sorted(table.items(), key=lambda item: item[0][0])
    ]


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(table: list[dict[str, Any]]) -> None:
    for row in table:
        columns = [
            f"{name} {v['median']:.3f} [{v['min']:.3f}, {v['max']:.3f}]"
            for name, v in row.items()
            if isinstance(v, dict)
        ]
        print(f"{row['load']:16} {row['contender']:20} {'   '.join(columns)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-router", metavar="PATH", help="its command, to compare with")
    parser.add_argument("--processes", type=int, default=1, help="of a further gateway with each policy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS), metavar="LOAD")
    parser.add_argument("--json", metavar="FILE", type=Path)
    arguments = parser.parse_args()
    policies = ["coterie round_robin", "coterie locality", "coterie marginal"]
    contenders = ["direct", *policies]
    if arguments.processes > 1:
        contenders += [f"{policy} --processes {arguments.processes}" for policy in policies]
    if arguments.vllm_router:
        contenders.append("vllm-router")
    allow_descriptors(max(load.concurrency for name in arguments.loads for load in LOADS[name]))  # of workers, too
    rows: list[tuple[str, str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        write_profile(folder / "profile.safetensors")
        for _ in range(arguments.rounds):
            rows += run_round(folder, contenders, arguments.loads, arguments.vllm_router)
    table = summarise(rows)
    load = os.getloadavg()[0]
    python = f"Python {platform.python_version()} ({sys.executable})"
    print(f"{arguments.rounds} rounds on {os.cpu_count()} cores, load average {load:.1f}, {python}")
    show(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
