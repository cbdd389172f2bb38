"""How tokens choose experts: from logits to probabilities, and from probabilities to counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Probabilities = npt.NDArray[np.float32]
"""How likely a token is to choose each expert, `[..., E]`; the last axis sums to top-k."""

_ROUNDS = 60
_CLOSE = 1e-5
_EDGE = 2.0**-20

_Floats = npt.NDArray[np.float64]


def marginals(logits: npt.NDArray[np.floating[Any]], top_k: int) -> Probabilities:
    """How likely each expert is to be among the k that a token draws in proportion to exp(logit), without repetition.

        p[e] = 1 - exp(-t exp(logit[e])),   t such that p sums to k

    Drawing without repetition is a race of exponential clocks with rates exp(logit): the first k win.  The formula is
    the race at a fixed time t; it is exact in the limit of many experts (Rosen 1972, "Asymptotic theory for successive
    sampling with varying probabilities without replacement").

    Args:
        logits: `[..., E]`.
        top_k: k, less than E.

    Returns:
        `[..., E]` from 0 to 1; the last axis sums to k.
    """
    rates = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float32)
    idle_wanted = rates.shape[-1] - top_k
    time = top_k / rates.sum(axis=-1, keepdims=True)  # not after the one that is sought, since 1 - exp(-x) <= x
    for _ in range(_ROUNDS):  # Newton's method on a concave function, from below: it never passes the solution
        idle = np.exp(-time * rates)
        lacking = idle.sum(axis=-1, keepdims=True) - idle_wanted
        if float(np.abs(lacking).max()) < _CLOSE * top_k:
            break
        time += lacking / (rates * idle).sum(axis=-1, keepdims=True)
    probabilities: Probabilities = 1 - np.exp(-time * rates)
    return probabilities


def draw_counts(
    probabilities: Probabilities, tokens: npt.NDArray[np.int64], rng: np.random.Generator, *, repeat: float = 1.0
) -> npt.NDArray[np.uint16]:
    """How many of a text's tokens chose each expert.

    Each expert's count is binomial, of `tokens / repeat` different tokens; then each layer is scaled to the sum that it
    must have and rounded at random (systematic sampling), so that token conservation holds exactly.

    Args:
        probabilities: `[N, L, E]`; each layer sums to a whole number, k.
        tokens: `[N]`, at most 65,535.
        rng: chance.
        repeat: how many tokens choose alike, at least 1.

    Returns:
        `[N, L, E]`; each layer of request i sums to `tokens[i] * k`, and no count is above `tokens[i]`.
    """
    most = tokens[:, None, None].astype(np.float64)
    sums = most * np.rint(probabilities[0, 0].sum())
    different = np.maximum(1, np.rint(tokens / repeat).astype(np.int64))[:, None, None]
    drawn = rng.binomial(different, np.clip(probabilities, 0, 1)).astype(np.float64)
    wanted = _fill(drawn + _EDGE * different, sums, most)  # none is zero, so that any sum can be reached
    ends = np.cumsum(wanted, axis=-1)
    ends *= sums / ends[..., -1:]
    offset = rng.uniform(_EDGE, 1 - _EDGE, size=(*ends.shape[:-1], 1))
    return np.diff(np.floor(ends + offset), axis=-1, prepend=0).astype(np.uint16)


def _fill(values: _Floats, sums: _Floats, most: _Floats) -> _Floats:
    """Scale positive values to the sums; what would be above `most` stays there, and the others take the rest."""
    full = np.zeros(values.shape, dtype=bool)
    while True:
        rest = sums - most * full.sum(axis=-1, keepdims=True)
        scaled = np.where(full, most, values * rest / np.where(full, 0, values).sum(axis=-1, keepdims=True))
        over = scaled > most
        if not over.any():
            return scaled
        full |= over
