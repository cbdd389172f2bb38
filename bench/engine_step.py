#!/usr/bin/env python3
"""What a step of the embedded engine costs beside the model: scheduling, sampling, counting, text.

    python3 bench/engine_step.py [--batch 32] [--json]

The model is made up: it answers at once, with random logits and experts (4096 tokens, 5 layers of 64 experts, top-4).
Each figure is CPU time of the engine's thread in a decode step: median and 95th percentile of 300.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.core import ModelGeometry
from coterie.engines.embedded.engine import Engine, EngineConfig
from coterie.engines.embedded.request import Submission
from coterie.engines.embedded.sampling import SamplingParams
from coterie.engines.embedded.scheduler import Limits
from coterie.engines.embedded.text import Detokenizer
from coterie.modeling import StepBatch, StepOutput

GEOMETRY = ModelGeometry(layers=5, experts=64, top_k=4)
VOCAB = 4096
PROMPT_TOKENS = 100
STEPS = 300
BLOCK_SIZE = 16
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 2 stop strings": {"temperature": 0.0, "stop": ("the end", "\n\n")},
    "greedy, counts and ids": {"temperature": 0.0, "asked": "counts+ids"},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "top_k 50": {"temperature": 0.8, "top_k": 50, "seed": 1},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},
}


class MadeUpModel:
    """Answers without computing."""

    geometry = GEOMETRY
    vocab = VOCAB

    def __init__(self, batch: int) -> None:
        rng = np.random.default_rng(0)
        self._logits = 3 * rng.normal(size=(batch, VOCAB)).astype(np.float32)
        choices = rng.random((512, GEOMETRY.layers, GEOMETRY.experts)).argsort(axis=-1)
        self._ids = choices[..., : GEOMETRY.top_k].astype(np.uint8)

    def forward(self, batch: StepBatch, kv: np.ndarray) -> StepOutput:
        """See `coterie.modeling.Model`."""
        return StepOutput(self._logits[: len(batch.logits_rows)], self._ids[: len(batch.token_ids)])


class MadeUpText:
    """Each token is a number."""

    end_ids = frozenset({0})
    pieces = tuple(f"{token:x} ".encode() for token in range(VOCAB))

    def detokenizer(self) -> Detokenizer:
        """See `coterie.engines.embedded.text.Tokenizer`."""
        return Detokenizer(self.pieces)


def decoding_engine(batch: int, fields: dict[str, Any]) -> Engine:
    """An engine in which all requests decode."""
    blocks = batch * (PROMPT_TOKENS + 2 * STEPS) // BLOCK_SIZE
    config = EngineConfig(blocks, BLOCK_SIZE, 4096, limits=Limits(running=batch, step_tokens=512))
    rng = np.random.default_rng(0)
    engine = Engine(MadeUpModel(batch), MadeUpText(), np.zeros((blocks, 1), np.float32), config, rng=rng)
    params = {name: value for name, value in fields.items() if name != "asked"}
    for number in range(batch):
        prompt = rng.integers(VOCAB, size=PROMPT_TOKENS).tolist()
        sampling = SamplingParams(max_tokens=2 * STEPS, ignore_eos=True, **params)
        engine.submit(Submission(str(number), prompt, sampling, asked=fields.get("asked")), _ignore)
    while engine.stats().prompt_tokens < batch * PROMPT_TOKENS:
        engine.step()
    return engine


def _ignore(_: object) -> None:
    pass


def cpu_ms(work: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(STEPS):
        began_s = time.thread_time()
        work()
        found.append(1000 * (time.thread_time() - began_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name, fields in CASES.items():
        times = cpu_ms(decoding_engine(options.batch, fields).step)
        rows.append({"case": name, "median_ms": float(np.median(times)), "p95_ms": float(np.quantile(times, 0.95))})
    if options.json:
        print(json.dumps({"batch": options.batch, "rows": rows}, indent=2))
        return
    print(f"CPU time of a decode step beside the model, {options.batch} requests (median, p95)")
    for row in rows:
        print(f"  {row['case']:24} {row['median_ms']:6.2f} ms {row['p95_ms']:6.2f} ms")


if __name__ == "__main__":
    main()
