#!/usr/bin/env python3
"""CPU time of decode steps and prefills of `coterie.modeling`, beside real vLLM on the same checkpoint if asked for.

    python3 bench/modeling.py [CHECKPOINT] [--pad 2048] [--vllm] [--dtype float32] [--compiled] [--rounds 5] [--json]
                             [--kernel NAME]

Requests have contexts of 256 tokens.  A decode step computes one token of each; prefill figures are for one prompt of
256 tokens, of up to four in a step.
Times are process CPU time, one thread, medians over the rounds; the two engines take turns within each round.  vLLM's
times are those of its whole step (scheduler, model and sampling in one process), coterie's are the forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded

import numpy as np

from coterie.modeling import Model, StepBatch, prepare
from coterie.modeling.kernels import Kernel, kernels

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "coterie-tiny"
BATCHES = (1, 8, 32)
CONTEXT = 256
STEPS = 16
PREFILLS = 4  # prompts in a step
BLOCK = 16
BAR = 1.5

Measure = Callable[[int], dict[str, float]]
"""From a batch size: milliseconds of CPU time of a decode step and of one prompt's prefill, and experts read."""


class Coterie:
    """The model with the caches of its requests."""

    def __init__(self, weights: Path, kernel: Kernel) -> None:
        self.model = Model.open(weights, kernel)
        self.rng = np.random.default_rng(0)
        self.per_request = (CONTEXT + STEPS) // BLOCK + 1
        self.kv = np.zeros(self.model.kv_shape(max(BATCHES) * self.per_request, BLOCK), np.float32)

    def measure(self, batch: int) -> dict[str, float]:
        """As `Measure`."""
        start = time.process_time()
        for first in range(0, batch, PREFILLS):
            self.step(list(range(first, min(first + PREFILLS, batch))), 0, CONTEXT)
        prefill = (time.process_time() - start) / batch
        start, active = time.process_time(), 0.0
        for number in range(STEPS):
            active += self.step(list(range(batch)), CONTEXT + number, 1)
        decode = (time.process_time() - start) / STEPS
        return {"decode_ms": decode * 1e3, "prefill_ms": prefill * 1e3, "active_experts": active / STEPS}

    def step(self, requests: list[int], position: int, tokens: int) -> float:
        """The next tokens of some requests; experts read, mean over layers."""
        count = len(requests) * tokens
        batch = StepBatch(
            self.rng.integers(0, self.model.vocab, count),
            np.tile(np.arange(position, position + tokens), len(requests)),
            [(place * tokens, tokens) for place in range(len(requests))],
            [range(request * self.per_request, (request + 1) * self.per_request) for request in requests],
            np.arange(tokens - 1, count, tokens),
        )
        ids = self.model.forward(batch, self.kv).expert_ids
        return float(np.mean([len(np.unique(ids[:, layer])) for layer in range(ids.shape[1])]))


@contextmanager
def vllm(checkpoint: Path, dtype: str, compiled: bool) -> Iterator[Measure]:
    """Real vLLM in its own environment, measured by `bench/modeling_vllm.py`."""
    env = Path(os.environ.get("COTERIE_VLLM_ENV") or ROOT / ".venv-vllm")
    command = [env / "bin" / "python", ROOT / "bench" / "modeling_vllm.py", checkpoint, dtype, str(int(compiled))]
    command += [str(CONTEXT), str(STEPS), str(PREFILLS * CONTEXT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def measure(batch: int) -> dict[str, float]:
            print(batch, file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("{"):  # the rest is vLLM's log
                    return json.loads(line)
            raise SystemExit(f"vLLM ended: run `make vllm-env`, or see {' '.join(map(str, command))}")

        yield measure
        process.stdin.close()


def run(engines: dict[str, Measure], rounds: int) -> list[dict[str, float | str]]:
    """Medians for each engine and batch size, after one round to warm up."""
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(rounds + 1):
        for batch in BATCHES:
            for name, measure in engines.items():
                seen.setdefault((name, batch), []).append(measure(batch))
    return [
        {"engine": name, "batch": batch}
        | {key: statistics.median(found[key] for found in all_found[1:]) for key in all_found[0]}
        for (name, batch), all_found in seen.items()
    ]


def show(rows: list[dict[str, float | str]]) -> None:
    """A table; with vLLM in it, each figure of coterie's as a multiple of vLLM's."""
    beside = {row["batch"]: row for row in rows if row["engine"] == "vllm"}
    print(f"{'engine':8} {'batch':>5} {'decode ms':>10} {'prefill ms':>10} {'experts':>8}  of vLLM's")
    for row in rows:
        other = beside.get(row["batch"]) if row["engine"] == "coterie" else None
        ratios = (
            "  ".join(f"{float(row[key]) / float(other[key]):.2f}" for key in ("decode_ms", "prefill_ms"))
            if other
            else ""
        )
        experts = f"{row['active_experts']:8.1f}" if "active_experts" in row else " " * 8
        print(
            f"{row['engine']:8} {row['batch']:5} {row['decode_ms']:10.2f} {row['prefill_ms']:10.2f} {experts}  {ratios}"
        )
    if beside:
        print(f"the bar at batch {max(BATCHES)} is {BAR} times vLLM's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=TINY)
    parser.add_argument("--pad", type=int, help="pad experts to so many intermediate columns")
    found = {kernel.name: kernel for kernel in kernels()}
    parser.add_argument("--kernel", choices=found, default=next(iter(found)), help="coterie's; default %(default)s")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--dtype", default="float32", help="vLLM's")
    parser.add_argument("--compiled", action="store_true", help="let vLLM compile the model; otherwise it runs eagerly")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = prepare(options.checkpoint, Path(folder), pad_intermediate=options.pad)
        engines: dict[str, Measure] = {"coterie": Coterie(weights, found[options.kernel]).measure}
        if options.vllm:
            with vllm(options.checkpoint, options.dtype, options.compiled) as measure:
                rows = run({**engines, "vllm": measure}, options.rounds)
        else:
            rows = run(engines, options.rounds)
    print(json.dumps({"rows": rows}, indent=2)) if options.json else show(rows)


if __name__ == "__main__":
    main()
