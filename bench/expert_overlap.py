#!/usr/bin/env python3
"""What a client gains by work of its own while a server computes: shared experts, or another batch.

    python3 bench/expert_overlap.py [--tokens 32] [--layers 8] [--rounds 30]

One server process has random experts (hidden size 512, 64 experts of size 256, top-8).  A step is so many layers; in
each the client works by itself for about as long as a call takes: on shared experts, or on the attention of a batch.
"Off" waits for the server first.  Two batches are halves of one, so each layer is asked for twice: on a CPU a batch of
half the size takes more than half of the time, so the gain is smaller than the overlap.  Ways take turns, figures are
medians.  It needs two idle cores: one for the server, one for the client.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
from expert_server import serving, write_random

from coterie.experts.client import RemoteExperts, RoutingTable, Server, Started
from coterie.experts.transport import SharedClient
from coterie.modeling.expert_tensors import ExpertModel, read_expert_model

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


class OneServer:
    """A directory of one server that has all experts."""

    def __init__(self, model: ExpertModel, config: dict[str, object]) -> None:
        server = Server("server", str(config["shared_memory"]))
        everything = [range(model.geometry.experts)] * model.geometry.layers
        epoch, tokens = int(str(config["since"])), int(str(config["max_tokens"]))
        self._table = RoutingTable.of(model.geometry, {server: everything}, epoch=epoch, tokens=tokens)

    def table(self) -> RoutingTable:
        """The only one."""
        return self._table

    def await_newer(self, table: RoutingTable, until_s: float) -> None:
        """There is none."""

    def doubt(self, server: Server, *, gone: bool) -> None:
        """There is nobody to tell."""


def batch_of(model: ExpertModel, tokens: int) -> Batch:
    rng, geometry = np.random.default_rng(tokens), model.geometry
    ids = rng.permuted(np.tile(np.arange(geometry.experts), (tokens, 1)), axis=1)[:, : geometry.top_k]
    return rng.standard_normal((tokens, model.hidden), np.float32), ids, rng.random(ids.shape, np.float32)


def median_s(act: Callable[[], object], times: int = 50) -> float:
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        act()
        found.append(time.perf_counter() - began_s)
    return float(np.median(found))


class Steps:
    """The ways to compute a step."""

    def __init__(self, remote: RemoteExperts, model: ExpertModel, tokens: int, layers: int) -> None:
        self._remote, self._layers = remote, layers
        self._whole, self._halves = batch_of(model, tokens), [batch_of(model, tokens // 2) for _ in range(2)]
        self._matrix = np.eye(model.hidden, dtype=np.float32)
        self._products = 1
        once_s = median_s(lambda: self._work(self._whole))
        self._products = max(1, round(median_s(lambda: self._finish(self._start(self._whole))) / once_s))

    def shared_after(self) -> None:
        """The server's experts, then the shared ones."""
        for _ in range(self._layers):
            self._finish(self._start(self._whole))
            self._work(self._whole)

    def shared_meanwhile(self) -> None:
        """The shared experts while the server computes."""
        for _ in range(self._layers):
            started = self._start(self._whole)
            self._work(self._whole)
            self._finish(started)

    def one_batch(self) -> None:
        """Attention, then the server's experts."""
        for _ in range(self._layers):
            self._work(self._whole)
            self._finish(self._start(self._whole))

    def two_batches(self) -> None:
        """While one half is at the server, the client works on the other."""
        waiting: Started | None = None
        for _ in range(self._layers):
            for half in self._halves:
                self._work(half)
                started = self._start(half)
                if waiting is not None:
                    self._finish(waiting)
                waiting = started
        if waiting is not None:
            self._finish(waiting)

    def _work(self, batch: Batch) -> None:
        values = batch[0]
        for _ in range(self._products):
            values = values @ self._matrix

    def _start(self, batch: Batch) -> Started:
        return self._remote.start(0, *batch)

    def _finish(self, started: Started) -> None:
        started.finish(time.monotonic() + 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 32, "layers": 8, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(write_random(Path(folder)), "coterie") as (url, _):
        model, config = read_expert_model(Path(folder)), httpx.get(f"{url}/config").json()
        remote = RemoteExperts(
            model.geometry, model.hidden, OneServer(model, config), lambda server: SharedClient(Path(server.address))
        )
        with closing(remote):
            steps = Steps(remote, model, options.tokens, options.layers)
            ways = {"shared experts": (steps.shared_after, steps.shared_meanwhile)}
            ways["second batch"] = (steps.one_batch, steps.two_batches)
            for name, (off, on) in ways.items():
                found = np.array([[median_s(way, 1) for way in (off, on)] for _ in range(options.rounds)])
                off_ms, on_ms = np.median(found, axis=0) * 1e3
                print(f"{name:15} off {off_ms:7.2f} ms  on {on_ms:7.2f} ms  {off_ms / on_ms:5.2f} times as fast")


if __name__ == "__main__":
    main()
