"""Traces for tests: the recorded counts of the tiny MoE, and small ones made up."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from coterie.activations import ActivationTrace
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.wire import count_ids

FIXTURES = Path(__file__).parent / "fixtures"
COTERIE_TINY = Path(__file__).parents[1] / "models" / "coterie-tiny"


@cache
def tiny_moe_trace() -> ActivationTrace:
    """768 held-out prompts of 256 tokens in 8 domains; 64 tokens of each output were forwarded."""
    with np.load(FIXTURES / "counts.npz") as file:
        requests = len(file["domain"])
        names = [str(name) for name in file["names"]]
        return ActivationTrace(
            model="tiny-moe",
            geometry=ModelGeometry(layers=5, experts=64, top_k=4),
            prefill=file["prefill"],
            decode=file["decode"],
            prefill_tokens=np.full(requests, 256),
            prefill_covered=np.full(requests, 256),
            decode_tokens=np.full(requests, 65),
            decode_covered=np.full(requests, 64),
            prompt_hashes=tuple(prompt_hash([i]) for i in range(requests)),
            labels=tuple(names[i] for i in file["domain"]),
            decode_ids=file["decode_ids"].reshape(-1, 5, 4),
        )


def coterie_tiny_trace() -> ActivationTrace:
    """512 held-out prompts of 256 tokens in the 8 domains of coterie-tiny; 64 tokens of each output were forwarded."""
    return _shared_prompts("coterie-tiny")


def untrained_trace() -> ActivationTrace:
    """The prompts of `coterie_tiny_trace` on the same configuration with random weights."""
    return _shared_prompts("coterie-tiny-untrained")


def tiny_moe_shared_trace() -> ActivationTrace:
    """The prompts of `coterie_tiny_trace` on tiny-moe, whose tokenizer makes other lengths of them."""
    return _shared_prompts("tiny-moe")


@cache
def _shared_prompts(name: str) -> ActivationTrace:
    """A trace that `scripts/train_tiny.py --fixtures` wrote."""
    with np.load(FIXTURES / "traces" / f"{name}.npz") as file:
        arrays = dict(file)
    layers, experts, top_k = (int(size) for size in arrays["geometry"])
    names = [str(label) for label in arrays["names"]]
    return ActivationTrace(
        model=name,
        geometry=ModelGeometry(layers, experts, top_k),
        prefill=arrays["prefill"],
        decode=arrays["decode"],
        prefill_tokens=arrays["prefill_tokens"],
        prefill_covered=arrays["prefill_tokens"],
        decode_tokens=arrays["decode_covered"] + 1,
        decode_covered=arrays["decode_covered"],
        prompt_hashes=tuple(row.tobytes().hex() for row in arrays["prompt_hashes"]),
        labels=tuple(names[i] for i in arrays["domain"]),
        decode_ids=arrays["decode_ids"],
    )


def random_ids(rng: np.random.Generator, tokens: int, geometry: ModelGeometry) -> np.ndarray:
    """`[tokens, L, top_k]` ids, different within each row."""
    order = rng.random((tokens, geometry.layers, geometry.experts)).argsort(axis=-1)
    return order[..., : geometry.top_k].astype(np.uint8)


def random_counts(
    rng: np.random.Generator, tokens: int, geometry: ModelGeometry, *, covered: int | None = None
) -> ExpertCounts:
    """Counts of `tokens` tokens, of which `covered` were counted."""
    covered = tokens if covered is None else covered
    return ExpertCounts(geometry, count_ids(random_ids(rng, covered, geometry), geometry.experts), tokens, covered)
