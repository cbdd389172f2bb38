#!/usr/bin/env python3
"""What three rules gain, off and on: shared experts while servers compute, two batches in flight, group shrink.

    python3 bench/expert_overlap.py [--kernel NAME] [--tokens 32] [--layers 8] [--rounds 30] [--json]

Random experts: hidden size 512, 64 experts of size 256, top-8.  Ways take turns, figures are medians.

For the first two, one server process has the experts.  A step is so many layers; in each the client works by itself
for about as long as a call takes: on shared experts, or on the attention of a batch.  "Off" waits for the server first.
Two batches are halves of one, so each layer is asked for twice: on a CPU a batch of half the size takes more than half
of the time, so the gain is smaller than the overlap.  It needs two idle cores: one for the server, one for the client.

Group shrink computes only experts that some token chose.  "Off" computes one row of each other expert besides, as a
product over all experts' groups does, by the same kernel in this process.  Where torch and triton are installed, the
table that steers the Triton kernel says how many tiles its programs visit, without a GPU in Triton's interpreter; how
long they take, a GPU alone can say (`--kernel triton`).
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded: the other core is the server's

import argparse
import json
import tempfile
import time
import typing
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from expert_server import OneServer, connect_to, serving, write_random

from coterie.experts.client import RemoteExperts, Started
from coterie.experts.server import load_experts, parse_experts
from coterie.experts.server.kernels import KernelName, make_kernel
from coterie.modeling.expert_tensors import ExpertFiles, ExpertModel, read_expert_model

CAVEAT = (
    "measured on a CPU, without a network: a batch of half the size takes more than half of the time there, and group "
    "shrink off reads the weights of idle experts, where programs on a GPU may step over them; its time needs a GPU"
)
SHRINK_TOKENS = (1, 8, 32)
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def batch_of(model: ExpertModel, tokens: int) -> Batch:
    rng, geometry = np.random.default_rng(tokens), model.geometry
    ids = rng.permuted(np.tile(np.arange(geometry.experts), (tokens, 1)), axis=1)[:, : geometry.top_k]
    return rng.standard_normal((tokens, model.hidden), np.float32), ids.copy(), rng.random(ids.shape, np.float32)


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


def taking_turns(name: str, off: Callable[[], object], on: Callable[[], object], rounds: int) -> dict[str, Any]:
    found = np.array([[median_s(way, 1) for way in (off, on)] for _ in range(rounds)])
    off_ms, on_ms = np.median(found, axis=0).tolist()
    return {"rule": name, "off ms": off_ms * 1e3, "on ms": on_ms * 1e3, "times as fast": off_ms / on_ms}


def overlap_rows(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    model = read_expert_model(folder)
    with serving(folder, options.kernel) as (url, _):
        directory = OneServer(model.geometry, httpx.get(f"{url}/config").json())
        remote = RemoteExperts(model.geometry, model.hidden, directory, connect_to)
        with closing(remote):
            steps = Steps(remote, model, options.tokens, options.layers)
            return [
                taking_turns("shared experts meanwhile", steps.shared_after, steps.shared_meanwhile, options.rounds),
                taking_turns("two batches in flight", steps.one_batch, steps.two_batches, options.rounds),
            ]


def with_idle(batch: Batch, experts: int) -> Batch:
    """A batch, and then tokens of weight 0 that choose each expert once that no token of it chose."""
    rows, ids, router = batch
    idle = np.setdiff1d(np.arange(experts), ids)
    more = np.full((-(-len(idle) // ids.shape[1]), ids.shape[1]), -1)
    more.reshape(-1)[: len(idle)] = idle
    zeros = (np.zeros((len(more), one.shape[1]), np.float32) for one in (rows, router))
    return tuple(map(np.concatenate, zip(batch, (next(zeros), more, next(zeros)), strict=True)))


def shrink_rows(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    files, kernel = ExpertFiles.open(folder), make_kernel(options.kernel)
    geometry = files.model.geometry
    layer = load_experts(files, parse_experts("all", geometry), kernel).layers[0]
    rows = []
    for tokens in SHRINK_TOKENS:
        on = batch_of(files.model, tokens)
        off = with_idle(on, geometry.experts)
        ways = [partial(kernel.compute, layer.weights, one[0], layer.places[one[1]], one[2]) for one in (off, on)]
        np.testing.assert_allclose(ways[0]()[:tokens], ways[1](), rtol=1e-4, atol=1e-4)
        row = taking_turns(f"group shrink, T={tokens}", *ways, options.rounds)
        counts = {"experts off": geometry.experts, "experts on": len(np.unique(on[1]))}
        rows.append({**row, **counts, **tiles(off[1], on[1], geometry.experts)})
    return rows


def tiles(off: np.ndarray, on: np.ndarray, experts: int) -> dict[str, int]:
    """Tiles of pairs that the Triton kernel visits, as its own table says; nothing where it is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from coterie.experts.triton.grouped import group

    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = [group(torch.from_numpy(ids.astype(np.int32)).to(device), experts).number.tolist() for ids in (off, on)]
    assert [groups for groups, _ in counts] == [len(np.unique(ids[ids >= 0])) for ids in (off, on)]
    return {"tiles off": counts[0][1], "tiles on": counts[1][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="coterie", choices=typing.get_args(KernelName))
    for name, default in {"tokens": 32, "layers": 8, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder))
        rows = [*overlap_rows(model, options), *shrink_rows(model, options)]
    if options.json:
        print(json.dumps({"kernel": options.kernel, "caveat": CAVEAT, "rules": rows}, indent=2))
        return
    for row in rows:
        name, off_ms, on_ms, gain, *counts = row.values()
        visited = "  ".join(f"{what} {count}" for what, count in zip([*row][4:], counts, strict=True))
        print(f"{name:25} off {off_ms:7.2f} ms  on {on_ms:7.2f} ms  {gain:5.2f} times as fast  {visited}".rstrip())
    print(f"kernel {options.kernel}; {CAVEAT}")


if __name__ == "__main__":
    main()
