"""Activation traces: which experts a set of requests used, in prefill and in decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import Counts, ModelGeometry

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ActivationTrace:
    """Expert counts of N requests.

    Attributes:
        model: name of the model, as its server calls it.
        geometry: L, E and top-k.
        prefill: `[N, L, E]` counts of prompt tokens; each layer of row i sums to `prefill_covered[i] * top_k`.
        decode: `[N, L, E]` counts of output tokens; each layer sums to `decode_covered[i] * top_k`.
        prefill_tokens: `[N]` prompt lengths.
        prefill_covered: `[N]` prompt tokens counted.
        decode_tokens: `[N]` output lengths.
        decode_covered: `[N]` output tokens counted; at most `decode_tokens - 1`, since the last sampled token is
            never forwarded.
        prompt_hashes: `core.prompt_hash` of each prompt.
        labels: domain label of each request; empty where none was given.
        decode_ids: `[sum of decode_covered, L, top_k]` expert ids, request after request; optional.
        gate_prob: `[N, L, E]` sums of gate probabilities over prompt tokens; optional.
        gate_logit: `[N, L, E]` sums of gate logits over prompt tokens; optional.
    """

    model: str
    geometry: ModelGeometry
    prefill: Counts
    decode: Counts
    prefill_tokens: Lengths
    prefill_covered: Lengths
    decode_tokens: Lengths
    decode_covered: Lengths
    prompt_hashes: tuple[str, ...]
    labels: tuple[str, ...]
    decode_ids: npt.NDArray[np.unsignedinteger[Any]] | None = None
    gate_prob: npt.NDArray[np.float32] | None = None
    gate_logit: npt.NDArray[np.float32] | None = None
