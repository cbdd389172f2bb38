"""Traces made up so that what they hold of locality is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from coterie.activations import ActivationTrace, TraceRecord, build_trace
from coterie.analysis import inspection
from coterie.core import ExpertCounts, ModelGeometry, prompt_hash
from coterie.quality import signature_quality
from coterie.wire import count_ids

GEOMETRY = ModelGeometry(layers=3, experts=32, top_k=2)


@cache
def trace_of(
    requests: int, *, domains: int = 4, shared: float = 0.0, own: float = 0.0, output: int = 12, seed: int = 0
) -> ActivationTrace:
    """Requests that prefer experts by their domain (`shared`) and by themselves (`own`), in prefill and decode alike.

    Each token takes the top-k of its request's preferences plus noise of its own (Gumbel, so that the choice is in
    proportion to the exponential of the preference).
    """
    rng = np.random.default_rng(seed)
    shape = (GEOMETRY.layers, GEOMETRY.experts)
    common = rng.normal(size=(domains, *shape)) * shared
    records = []
    for i in range(requests):
        preference = common[i % domains] + rng.normal(size=shape) * own
        ids = [_choose(rng, preference, tokens) for tokens in (40, output)]
        prompt, answer = (ExpertCounts(GEOMETRY, count_ids(some, 32), len(some), len(some)) for some in ids)
        label = f"domain {i % domains}"
        records.append(TraceRecord(prompt, answer, output + 1, prompt_hash([i]), label, decode_ids=ids[1]))
    return build_trace("made-up", records)


def _choose(rng: np.random.Generator, preference: np.ndarray, tokens: int) -> np.ndarray:
    noisy = preference + rng.gumbel(size=(tokens, *preference.shape))
    return np.argsort(-noisy, axis=-1)[..., : GEOMETRY.top_k].astype(np.uint8)


def domains_differ(requests: int = 320) -> ActivationTrace:
    """Each domain has its experts: the clearest locality."""
    return trace_of(requests, shared=2.5)


def like_untrained(requests: int = 320) -> ActivationTrace:
    """Each request has its own experts and keeps to them, whatever its domain: high r and rho, no locality."""
    return trace_of(requests, own=2.5)


def without_labels(trace: ActivationTrace) -> ActivationTrace:
    return replace(trace, labels=("",) * len(trace))


def without_output(trace: ActivationTrace) -> ActivationTrace:
    nothing = np.zeros(len(trace), dtype=np.int64)
    return replace(
        trace, decode=np.zeros_like(trace.decode), decode_tokens=nothing, decode_covered=nothing, decode_ids=None
    )


@contextmanager
def roughly() -> Iterator[None]:
    """Inspect with few pairs and resamples, which is quick and leaves rho rough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "DEFAULT_PAIRS", 1000)
        patch.setattr(inspection, "signature_quality", partial(signature_quality, resamples=20))
        yield
