#!/usr/bin/env python3
"""Steps of the embedded engine whose experts are in a server, whole ("off") and as two halves that take turns ("on").

    python3 bench/engine_overlap.py [--pairs-per-s N] [--rounds 30] [--json]

A random model of eight layers whose attention takes about as long as its experts (hidden size 512, 32 experts of size
128, top-4).  A step is one token of each of so many requests, after 200 others, or a prompt of 256 tokens; outputs are
compared bit by bit before they are timed.  Ways take turns, figures are medians; "CPU" is that of the client's thread.

Without `--pairs-per-s` client and server share the machine's cores: two idle ones at least, or the server's work takes
the client's time.  With it, the server computes so many pairs of token and expert in a second and no more, and sleeps
meanwhile, as if it had a machine of its own.  On a CPU a half takes more than half of the time, on both sides.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded: the other core is the server's

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from expert_server import OneServer, connect_to, serving

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coterie.experts.client import RemoteExperts
from coterie.experts.client.model_experts import ModelExperts
from coterie.modeling import Model, StepBatch, prepare
from coterie.modeling.expert_tensors import read_expert_model
from tiny_checkpoints import write_checkpoint

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "vocab_size": 1000,
}
REQUESTS, CONTEXT, PROMPT, BLOCK = (2, 8, 16, 32, 64), 200, 256, 16
TIMEOUT_S = 30.0
Way = Callable[[], object]


class Steps:
    """A model of which a server computes the experts, whole and in halves."""

    def __init__(self, remote: RemoteExperts, weights: Path) -> None:
        experts = ModelExperts(remote, TIMEOUT_S)
        self._whole, self._halves = (Model.open(weights, experts=experts, overlap=overlap) for overlap in (None, 2))
        self._rng = np.random.default_rng(0)

    def ways(self, requests: int, start: int, stop: int) -> tuple[Way, Way]:
        """Off and on, for the tokens from `start` to `stop` of so many requests."""
        each, blocks = stop - start, -(-stop // BLOCK)
        batch = StepBatch(
            self._rng.integers(0, self._whole.vocab, requests * each),
            np.tile(np.arange(start, stop), requests),
            [(number * each, each) for number in range(requests)],
            np.arange(requests * blocks).reshape(requests, blocks).tolist(),
            np.arange(requests) * each + each - 1,
        )
        kv = self._rng.standard_normal(self._whole.kv_shape(requests * blocks, BLOCK)).astype(np.float32)
        np.testing.assert_array_equal(self._whole.forward(batch, kv).logits, self._halves.forward(batch, kv).logits)
        return lambda: self._whole.forward(batch, kv), lambda: self._halves.forward(batch, kv)


def row(name: str, tokens: int, ways: tuple[Way, Way], rounds: int) -> dict[str, Any]:
    """One line; `tokens` are those of a step."""
    (off_s, off_cpu_s), (on_s, on_cpu_s) = np.median([[timed(way) for way in ways] for _ in range(rounds)], axis=0)
    return {
        "step": name,
        "off ms": off_s * 1e3,
        "on ms": on_s * 1e3,
        "off CPU ms": off_cpu_s * 1e3,
        "on CPU ms": on_cpu_s * 1e3,
        "off tokens/s": tokens / off_s,
        "on tokens/s": tokens / on_s,
        "times as fast": off_s / on_s,
    }


def timed(way: Way) -> tuple[float, float]:
    """Seconds, and of CPU time of this thread."""
    began_s, cpu_s = time.perf_counter(), time.thread_time()
    way()
    return time.perf_counter() - began_s, time.thread_time() - cpu_s


def rows(folder: Path, served: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    checkpoint = write_checkpoint(folder, "qwen3_moe", **SIZES)
    model, weights = read_expert_model(checkpoint), prepare(checkpoint, folder / "packed", routed=False)
    with serving(checkpoint, "coterie", *served) as (url, _):
        directory = OneServer(model.geometry, httpx.get(f"{url}/config").json())
        with closing(RemoteExperts(model.geometry, model.hidden, directory, connect_to)) as remote:
            steps = Steps(remote, weights)
            for count in REQUESTS:
                yield row(f"{count} requests", count, steps.ways(count, CONTEXT, CONTEXT + 1), rounds)
            yield row("a prompt", PROMPT, steps.ways(1, 0, PROMPT), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs-per-s", type=float)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    served = ["--max-tokens", str(PROMPT)]
    if options.pairs_per_s:
        served += ["--pairs-per-s", str(options.pairs_per_s)]
    with tempfile.TemporaryDirectory() as folder:
        for found in rows(Path(folder), served, options.rounds):
            if options.json:
                print(json.dumps(found), flush=True)
                continue
            name, *figures = found.items()
            print(f"{name[1]:12} " + "  ".join(f"{what} {value:8.2f}" for what, value in figures), flush=True)


if __name__ == "__main__":
    main()
