"""Does a request decode with the experts that its prompt used?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import Counts
from coterie.errors import InputError

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_BLOCK = 256  # rows made float at a time: a quarter thousand of 48 x 128 counts are 6 MB


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that every request has, over all requests.

    Attributes:
        mean: mean.
        deviation: standard deviation (of the requests, not of the mean).
        low: 5th percentile.
        high: 95th percentile.
        count: requests that have the figure.
    """

    mean: float
    deviation: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's r between expert counts of prompts and of outputs, over all L * E experts.

    `own` alone proves nothing: where all requests use the same experts, or each uses its own by chance, it is
    high too.  What exceeds `other` is the request's; what `same_domain` has above `other` is its domain's.

    Attributes:
        own: each prompt with its own output.
        other: each prompt with the output of another request, the mismatched control.
        same_domain: each prompt with the output of another request of its label; None if no label has two requests.
    """

    own: Spread
    other: Spread | None
    same_domain: Spread | None


def prefill_decode_correlation(
    prefill: Counts, decode: Counts, labels: Sequence[str], rng: np.random.Generator
) -> Correlation:
    """Correlate how often each expert was used in prefill and in decode, request by request.

        r[i, j] = Pearson's r between prefill[i, :, :] and decode[j, :, :], each flattened

    The number of tokens cancels out, so counts serve as frequencies.  ELDR's section on motivation reports
    r = 0.70 to 0.92 for three models and two workloads.

    Args:
        prefill: `[N, L, E]` counts of prompt tokens.
        decode: `[N, L, E]` counts of output tokens.
        labels: `[N]` domain labels; empty for none.
        rng: source of the controls' pairs; every request is used once on each side.

    Raises:
        InputError: the shapes differ, or no request has a defined r (all use all experts equally, or none).
    """
    if prefill.shape != decode.shape or prefill.ndim != 3 or len(labels) != len(prefill):
        raise InputError(f"correlation: {prefill.shape} and {decode.shape} counts with {len(labels)} labels")
    everyone = np.arange(len(prefill))
    own = spread_of(correlations(prefill, decode, everyone, everyone))
    if own is None:
        raise InputError("correlation: no request used some experts more than others, in prefill and in decode")
    other = _exchanged(everyone, rng)
    near = [_exchanged(members, rng) for members in members_of(labels).values()]
    same = (np.concatenate([pair[side] for pair in near] or [everyone[:0]]) for side in (0, 1))
    return Correlation(
        own, spread_of(correlations(prefill, decode, *other)), spread_of(correlations(prefill, decode, *same))
    )


def members_of(labels: Sequence[str]) -> dict[str, Indices]:
    """Positions of each label, in the labels' order; requests without a label are nobody's."""
    names = np.array(labels, dtype=object)
    return {name: np.flatnonzero(names == name) for name in sorted(set(labels) - {""})}


def _exchanged(members: Indices, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Pairs in which every member is once on each side and never its own partner; none for a single member."""
    order = rng.permutation(members)
    return (order, np.roll(order, 1)) if len(members) > 1 else (order[:0], order[:0])


def correlations(left: npt.NDArray[Any], right: npt.NDArray[Any], rows: Indices, partners: Indices) -> Floats:
    """Pearson's r between `left[rows[i]]` and `right[partners[i]]`.

    Returns:
        One r for each pair; NaN where a side is constant.
    """
    found = np.empty(len(rows))
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        a, b = _centred(left[rows[block]]), _centred(right[partners[block]])
        lengths = np.sqrt(np.einsum("nd,nd->n", a, a) * np.einsum("nd,nd->n", b, b))
        products = np.einsum("nd,nd->n", a, b)
        found[block] = np.divide(products, lengths, out=np.full(len(a), np.nan), where=lengths > 0)
    return found


def _centred(values: npt.NDArray[Any]) -> Floats:
    rows: Floats = values.reshape(len(values), -1).astype(np.float64)
    rows -= rows.mean(axis=1, keepdims=True)
    return rows


def spread_of(values: Floats) -> Spread | None:
    """Mean and spread of the values that are numbers; None if none is."""
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    low, high = np.percentile(known, [5, 95])
    return Spread(float(known.mean()), float(known.std()), float(low), float(high), len(known))
