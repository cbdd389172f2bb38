#!/usr/bin/env python3
"""Whole calls to an expert server process beside the same kernel in this process, and how often requests merge.

    python3 bench/expert_server.py [MODEL] [--kernel NAME] [--awake] [--json]

MODEL is a checkpoint's folder; without one, random experts are written: one layer, hidden size 512, 64 experts of size
256, top-8.  "Call" is the transport alone, "client call" a call of `RemoteExperts`, as an engine makes it.  Calls and
local computations take turns, so that both meet the same machine: "above kernel" is the difference of the medians.
"Above computing" is that of the means of calls and of what the server says that their batches took: where weights fill
no cache, equal kernels of two processes differ by tenths, depending on where in memory their weights are.  "Waking" is
what two bare doorbells take where either side is busy as long in turn, so what of a call is the machine's own;
`--awake` (for root) keeps idle cores from sleeping.  For merging, two client processes ask at full rate, each for layer
after layer.  Run it on a quiet machine; for vLLM's kernel, with the Python of the environment that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import tempfile
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from processes import coterie, cpu_s
from safetensors.numpy import save_file

from coterie.core import ModelGeometry
from coterie.experts.client import RemoteExperts, RoutingTable, Server
from coterie.experts.protocol import Request
from coterie.experts.server import load_experts, parse_experts
from coterie.experts.server.kernels import KernelName, make_kernel
from coterie.experts.transport import SharedClient
from coterie.experts.transport.doorbell import Doorbell
from coterie.experts.transport.identity import own_identity
from coterie.experts.transport.words import Words
from coterie.modeling.expert_tensors import ExpertFiles

CALLS, WARM_UP, WAKINGS, MERGE_S = 600, 50, 200, 3.0
TOKENS = (1, 16, 64)


def write_random(folder: Path, hidden: int = 512, experts: int = 64, size: int = 256, top_k: int = 8) -> Path:
    rng = np.random.default_rng(0)
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden,
        "intermediate_size": size,
    }
    shapes = {"w1": (size, hidden), "w3": (size, hidden), "w2": (hidden, size)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {
            f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": rng.standard_normal(shape, np.float32)
            for expert in range(experts)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    return folder


@contextmanager
def cores_awake(*, wanted: bool) -> Iterator[None]:
    """Have idle cores poll; see Linux's Documentation/power/pm_qos_interface.rst."""
    if not wanted:
        yield
        return
    with Path("/dev/cpu_dma_latency").open("wb", buffering=0) as held:
        held.write(bytes(4))  # no latency at all, as long as it is open
        yield


def serving(model: Path, kernel: str, *options: str) -> AbstractContextManager[tuple[str, int]]:
    """URL and process of a server of all experts."""
    return coterie("experts", "serve", model, "--kernel", kernel, "--max-tokens", str(max(TOKENS)), *options)


class OneServer:
    """A directory of one server that has all experts."""

    def __init__(self, geometry: ModelGeometry, config: dict[str, Any]) -> None:
        server = Server("server", config["shared_memory"])
        everything = [range(geometry.experts)] * geometry.layers
        self._table = RoutingTable.of(
            geometry, {server: everything}, epoch=config["since"], tokens=config["max_tokens"]
        )

    def table(self) -> RoutingTable:
        """The only one."""
        return self._table

    def await_newer(self, table: RoutingTable, until_s: float) -> None:
        """There is none."""

    def doubt(self, server: Server, *, gone: bool) -> None:
        """There is nobody to tell."""


def connect_to(server: Server) -> SharedClient:
    return SharedClient(Path(server.address))


def random_request(rng: np.random.Generator, config: dict[str, Any], tokens: int, layer: int) -> Request:
    ids = rng.permuted(np.tile(np.arange(config["experts"], dtype=np.int32), (tokens, 1)), axis=1)
    hidden = rng.standard_normal((tokens, config["hidden"]), np.float32)
    top_k = config["top_k"]
    weights = rng.random((tokens, top_k), np.float32)
    return Request(layer, config["since"], own_identity(), hidden, ids[:, :top_k].copy(), weights)


class Turns:
    """The kernel here, a call by the transport alone, and one of `RemoteExperts`, with the same requests."""

    def __init__(self, model: Path, name: KernelName, config: dict[str, Any]) -> None:
        files, self._kernel, self.config = ExpertFiles.open(model), make_kernel(name), config
        geometry = files.model.geometry
        held = parse_experts(f"0:0-{geometry.experts - 1}", geometry)
        self._layer = load_experts(files, held, self._kernel, since=config["since"]).layers[0]
        self._client = SharedClient(Path(config["shared_memory"]))
        self._remote = RemoteExperts(geometry, files.model.hidden, OneServer(geometry, config), connect_to)

    def kernel(self, one: Request) -> npt.NDArray[Any]:
        """The kernel in this process."""
        layer = self._layer
        return self._kernel.compute(layer.weights, one.hidden, layer.places[one.ids], one.weights)

    def call(self, one: Request) -> npt.NDArray[Any]:
        """The transport alone."""
        return self._client.call(one, timeout_s=10).sums

    def client_call(self, one: Request) -> npt.NDArray[Any]:
        """As an engine calls."""
        return self._remote.compute(0, one.hidden, one.ids, one.weights, time.monotonic() + 10)

    def take(self, way: Callable[[Request], Any], one: Request) -> tuple[float, float, float]:
        """Seconds of the kernel, of a call, and of CPU here in the call."""
        (kernel_s, _, sums), (call_s, call_cpu_s, got) = timed(self.kernel, one), timed(way, one)
        assert np.array_equal(got, sums)
        return kernel_s, call_s, call_cpu_s

    def close(self) -> None:
        """Leave the server."""
        self._client.close()
        self._remote.close()


def measure_calls(turns: Turns, url: str, server: int, tokens: int, way: str) -> dict[str, Any]:
    rng, call = np.random.default_rng(tokens), {"call": turns.call, "client call": turns.client_call}[way]
    times: list[tuple[float, float, float]] = []
    for turn in range(WARM_UP + CALLS):
        if turn == WARM_UP:
            times, before_cpu, before = [], cpu_s(server), httpx.get(f"{url}/load").json()["busy_s"]
        times.append(turns.take(call, random_request(rng, turns.config, tokens, 0)))
    computing_us = (httpx.get(f"{url}/load").json()["busy_s"] - before) / CALLS * 1e6
    server_us = (cpu_s(server) - before_cpu) / CALLS * 1e6
    kernel_us, call_us, _ = np.median(times, axis=0) * 1e6
    _, mean_us, cpu_us = np.mean(times, axis=0) * 1e6
    return {
        "tokens": tokens,
        "way": way,
        "p50 us": call_us,
        "p99 us": np.percentile(times, 99, axis=0)[1] * 1e6,
        "kernel us": kernel_us,
        "above kernel us": call_us - kernel_us,
        "mean us": mean_us,
        "computing us": computing_us,
        "above computing us": mean_us - computing_us,
        "waking us": measure_waking(kernel_us / 1e6),
        "client CPU us": cpu_us,
        "server CPU us": server_us,
    }


def measure_waking(busy_s: float) -> float:
    """Microseconds of a ring there and one back, after this side was busy and beside what the other one is."""
    words = Words(mmap.mmap(-1, mmap.PAGESIZE))
    there, here = Doorbell(words, 0), Doorbell(words, 64)
    process = multiprocessing.get_context("fork").Process(target=answer_bells, args=(words, busy_s), daemon=True)
    process.start()
    times = []
    for turn in range(WAKINGS):
        be_busy(busy_s)
        start = time.perf_counter()
        there.ring()
        here.wait(lambda turn=turn: words.load32(64) > turn or None, 1)
        times.append(time.perf_counter() - start - busy_s)
    process.kill()
    process.join()
    return float(np.median(times[WAKINGS // 10 :])) * 1e6


def answer_bells(words: Words, busy_s: float) -> None:
    there, here = Doorbell(words, 64), Doorbell(words, 0)
    for turn in range(WAKINGS):
        here.wait(lambda turn=turn: words.load32(0) > turn or None, 10)
        be_busy(busy_s)
        there.ring()


def be_busy(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


def timed(way: Callable[[Request], Any], one: Request) -> tuple[float, float, Any]:
    """Seconds, and of CPU time, and what came of it."""
    start, cpu = time.perf_counter(), time.thread_time()
    found = way(one)
    return time.perf_counter() - start, time.thread_time() - cpu, found


def ask_at_full_rate(config: dict[str, Any], seed: int, until_s: float) -> None:
    client, rng = SharedClient(Path(config["shared_memory"])), np.random.default_rng(seed)
    requests = [random_request(rng, config, 16, layer) for layer in range(config["layers"])]
    number = 0
    while time.monotonic() < until_s:
        client.call(requests[number % len(requests)], timeout_s=10)
        number += 1
    client.close()


def measure_merging(url: str, config: dict[str, Any]) -> dict[str, float]:
    before = httpx.get(f"{url}/load").json()
    until_s = time.monotonic() + MERGE_S
    context = multiprocessing.get_context("fork")
    clients = [context.Process(target=ask_at_full_rate, args=(config, seed, until_s)) for seed in (1, 2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    after = httpx.get(f"{url}/load").json()
    requests, batches = (after[name] - before[name] for name in ("merged", "batches"))
    return {"requests/s": requests / MERGE_S, "requests per batch": requests / batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--kernel", default="coterie", choices=typing.get_args(KernelName))
    parser.add_argument("--awake", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cores_awake(wanted=arguments.awake):
        model = arguments.model or write_random(Path(folder))
        with serving(model, arguments.kernel) as (url, process):
            config = httpx.get(f"{url}/config").json()
            with closing(Turns(model, arguments.kernel, config)) as turns:
                calls = [measure_calls(turns, url, process, *what) for what in product(TOKENS, ("call", "client call"))]
            results = {"kernel": config["kernel"], "calls": calls, "merging": measure_merging(url, config)}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"kernel {results['kernel']}")
    for row in [*results["calls"], results["merging"]]:
        print("  ".join(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in row.items()))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
