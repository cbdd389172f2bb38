"""How well signatures foretell decoding: rank correlation of distances, and the layers that raise it most.

A signature is good if requests whose signatures are close use close experts while they decode (ELDR Eq. 1):

    rho = Spearman over pairs (i, j) of ( 1 - cos(s_i, s_j), 1 - cos(d_i, d_j) )

with s the signature and d the decode counts over all layers.  Spearman does not change when both sides change
sign, so cosines are ranked, not distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError

DEFAULT_PAIRS = 30_000
DEFAULT_RESAMPLES = 200

Pairs = npt.NDArray[np.int64]
"""Pairs of request positions, `[P, 2]`."""

Values = npt.NDArray[np.unsignedinteger[Any]] | npt.NDArray[np.floating[Any]]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]

_ONE = float(1 << 30)  # cosines are ranked in steps of 1 / _ONE
_BLOCK = 1 << 15  # numbers of one side that are multiplied at once: 256 KiB, both sides fit a core's cache
_COLUMNS = 256
_LEAST = 1e-200  # no sum of squares of float32 numbers but 0 is smaller
_WHOLE_FLOAT32 = 1 << 24
_TAIL = 0.025  # outside each end of a 95 % interval


@dataclass(frozen=True, slots=True)
class Rho:
    """Spearman correlation over pairs of requests, with a 95 % confidence interval.

    Attributes:
        value: the correlation over the pairs; nan where it is not defined, because there are fewer than two pairs or
            all of them are equally far apart on one side.
        low: lower end; nan where `value` is.
        high: upper end; nan where `value` is.
        pairs: number of pairs.
        requests: number of different requests in them.
    """

    value: float
    low: float
    high: float
    pairs: int
    requests: int


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """The layers that greedy forward selection keeps.

    Attributes:
        layers: kept positions, ascending: the first layers of `order`, through the first maximum of `curve`.
        rho: that maximum; nan where no choice of layers has a correlation.
        order: all L positions in the order in which they were taken.
        curve: `curve[n]` is the correlation of the first n + 1 layers of `order`; nan where it is not defined.
    """

    layers: tuple[int, ...]
    rho: float
    order: tuple[int, ...]
    curve: tuple[float, ...]


# --- pairs and distances ------------------------------------------------------------------------------


def random_pairs(requests: int, pairs: int, rng: np.random.Generator) -> Pairs:
    """Different pairs of requests, each as likely as any other.

    Args:
        requests: number N of requests.
        pairs: how many to draw; all N (N - 1) / 2 where there are no more.
        rng: source of the choice.

    Returns:
        `[P, 2]` positions i < j, sorted; no pair twice.

    Raises:
        InputError: `requests` or `pairs` is negative.
    """
    if requests < 0 or pairs < 0:
        raise InputError(f"quality: {pairs} pairs of {requests} requests; neither can be negative")
    total = requests * (requests - 1) // 2
    chosen = np.sort(rng.choice(total, pairs, replace=False, shuffle=False)) if pairs < total else np.arange(total)
    first = np.arange(requests)
    begin = first * (2 * requests - first - 1) // 2  # number of the pair (i, i + 1), pairs in lexicographic order
    i = np.searchsorted(begin, chosen, side="right") - 1
    return np.stack([i, chosen - begin[i] + i + 1], axis=1).astype(np.int64)


def within_labels(labels: Sequence[str], pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Which pairs are of two requests with the same label; requests without one (the empty label) are in none.

    Raises:
        InputError: a pair is not of two requests that have a place in `labels`.
    """
    _check_pairs(pairs, len(labels))
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    numbers = np.array([number[label] if label else -1 for label in labels], dtype=np.int64)
    i, j = pairs.T
    same: npt.NDArray[np.bool_] = (numbers[i] == numbers[j]) & (numbers[i] >= 0)
    return same


def unit_rows(values: Values) -> npt.NDArray[np.float32]:
    """`values` `[N, ...]` flattened to rows of length 1, `[N, D]`; an all-zero row stays zero."""
    rows = _flat(values).astype(np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
    np.divide(rows, norms, out=rows, where=norms > 0)
    return rows


def cosines(rows: Values, pairs: Pairs) -> Floats:
    """Cosine of the two rows of each pair, in steps of 2^-30.

    Sums are in float64, whatever the rows.  The steps let pairs that are equally far apart be seen to be so: without
    them a last bit, which depends on the order of a sum, would put one before the other.  An all-zero row has no
    direction; its cosine with any row is 0.

    Args:
        rows: `[N, ...]`, of any length.
        pairs: `[P, 2]`.

    Returns:
        `[P]`, from -1 to 1.

    Raises:
        InputError: a pair is not of two different rows, or a value is not finite.
    """
    _check_pairs(pairs, len(rows))
    return _pair_keys(rows, pairs) / _ONE - 1


def _check_pairs(pairs: Pairs, requests: int) -> None:
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind != "i":
        raise InputError(f"quality: pairs of shape {pairs.shape} {pairs.dtype} are not [P, 2] whole numbers")
    wrong = np.flatnonzero(((pairs < 0) | (pairs >= requests)).any(axis=1) | (pairs[:, 0] == pairs[:, 1]))
    if wrong.size:
        i, j = pairs[wrong[0]].tolist()
        raise InputError(f"quality: pair ({i}, {j}) is not of two different requests from 0 to {requests - 1}")


def _pair_keys(rows: Values, pairs: Pairs) -> Keys:
    flat = _flat(rows)
    dots, squares = np.zeros(len(pairs)), np.zeros(len(rows))
    for begin in range(0, flat.shape[1], _COLUMNS):
        part_dots, part_squares = _dots(flat[:, begin : begin + _COLUMNS], pairs)
        dots += part_dots
        squares += part_squares
    return _keys(dots, squares, *_sides(pairs))


def _flat(values: Values) -> Values:
    return values.reshape(len(values), prod(values.shape[1:]))


def _sides(pairs: Pairs) -> tuple[Positions, Positions]:
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def _dots(rows: Values, pairs: Pairs) -> tuple[Floats, Floats]:
    """Inner products of the pairs, and squared lengths of all rows; in float64, blocks of pairs at a time."""
    exact = rows.astype(np.float64)
    squares = np.einsum("nd,nd->n", exact, exact)
    if not np.isfinite(squares).all():
        raise InputError(
            f"quality: request {np.flatnonzero(~np.isfinite(squares))[0]} holds a value that is not finite"
        )
    if rows.dtype.kind == "u" and squares.max(initial=0) < _WHOLE_FLOAT32:
        exact = rows.astype(np.float32)  # faster, and every sum is still a whole number that float32 holds
    i, j = _sides(pairs)
    dots = np.empty(len(pairs))
    step = max(_BLOCK // rows.shape[1], 1)
    for begin in range(0, len(pairs), step):
        block = slice(begin, begin + step)
        dots[block] = np.einsum("pd,pd->p", exact.take(i[block], axis=0), exact.take(j[block], axis=0))
    return dots, squares


def _keys(dots: Floats, squares: Floats, i: Positions, j: Positions) -> Keys:
    """(1 + cosine) * 2^30, rounded: whole numbers that sort as the cosines do."""
    scale = np.sqrt(_ONE / np.maximum(squares, _LEAST))  # where a row is zero, so are its products
    scaled = dots * scale[i]
    scaled *= scale[j]
    scaled += _ONE + 0.5  # conversion cuts off what is behind the point
    return scaled.astype(np.uint32)


# --- rank correlation ---------------------------------------------------------------------------------


def spearman(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Spearman's rank correlation of two lists of finite numbers; equal ones share the average of their ranks.

    Args:
        a: `[P]`.
        b: `[P]`.

    Returns:
        From -1 to 1; nan where there are fewer than two numbers, or all are equal on one side.

    Raises:
        InputError: the lists differ in length, or a number is not finite.
    """
    if a.ndim != 1 or a.shape != b.shape:
        raise InputError(f"quality: lists of shape {a.shape} and {b.shape} have no rank correlation")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("quality: a number to be ranked is not finite")
    return _correlation(_ranks(a), _ranks(b))


def _ranks(values: npt.NDArray[Any]) -> Floats:
    order = np.argsort(values)
    ranks = np.empty(len(values))
    ranks[order] = _ranks_in_order(values[order])
    return ranks


def _ranks_in_order(ordered: npt.NDArray[Any]) -> Floats:
    """Ranks of ascending values, less their mean."""
    ranks = np.arange(len(ordered), dtype=np.float64)
    ranks -= (len(ordered) - 1) / 2
    tied = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1  # those equal to the one before
    if tied.size:
        opens = np.flatnonzero(np.diff(tied, prepend=-1) > 1)  # the first of each run of ties
        lengths = np.diff(opens, append=tied.size)
        heads = tied[opens] - 1
        ranks[heads] += lengths / 2
        ranks[tied] = np.repeat(ranks[heads], lengths)
    return ranks


def _correlation(x: Floats, y: Floats) -> float:
    """Of centred ranks.  The sums are multiples of 1/4, hence exact up to 300,000 pairs, and never made by threads."""
    spread = np.einsum("p,p->", x, x) * np.einsum("p,p->", y, y)
    return float(np.einsum("p,p->", x, y) / np.sqrt(spread)) if spread > 0 else nan


# --- quality ------------------------------------------------------------------------------------------


def signature_quality(
    signatures: Values,
    decode: Values,
    pairs: Pairs,
    rng: np.random.Generator,
    *,
    resamples: int = DEFAULT_RESAMPLES,
) -> Rho:
    """Rho of ELDR Eq. 1 (see the module), with a 95 % confidence interval.

    Pairs share requests, so they are no independent samples, and an interval that took them for such would be far too
    narrow.  Requests are independent: each resample draws as many requests as there are, with replacement, and weighs
    pair (i, j) by how often i was drawn times how often j was.  The interval is from the 2.5th to the 97.5th percentile
    of the resamples' correlations.  Chance in the choice of pairs is counted too often by the product of weights (its
    variance up to three times), so that with few pairs for each request the interval is rather too wide.

    A resample in which the correlation is not defined (too few different requests) says nothing: it counts as -1 for
    the lower end and as 1 for the upper one.  Thus a handful of requests gives the interval from -1 to 1.

    Sources: Snijders and Borgatti, "Non-parametric standard errors and tests for network statistics", Connections
    22(2), 1999 (resampling vertices); Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 1(2), 2007
    (product weights, and that they err on the wide side).

    Args:
        signatures: `[N, D]` rows, of any length, since cosines are taken.
        decode: `[N, ...]` counts of output tokens, all layers.
        pairs: `[P, 2]`.
        rng: source of the resamples; the value does not depend on it.
        resamples: how many.

    Raises:
        InputError: the two are not of the same requests, a pair is not of two of them, a value is not finite, or
            `resamples` is below 1.
    """
    _check_same_requests(signatures, decode, pairs)
    if resamples < 1:
        raise InputError(f"quality: {resamples} resamples give no interval; at least 1")
    drawn, numbers = np.unique(pairs, return_inverse=True)
    i, j = numbers.reshape(pairs.shape).T
    sides = _Side.of(_pair_keys(signatures, pairs)), _Side.of(_pair_keys(decode, pairs))
    value = _weighted(*sides, np.ones(len(pairs), np.int64))
    low = high = nan
    if not isnan(value):
        found = np.array([_weighted(*sides, draw[i] * draw[j]) for draw in _draws(len(drawn), resamples, rng)])
        low = float(np.quantile(np.nan_to_num(found, nan=-1.0), _TAIL))
        high = float(np.quantile(np.nan_to_num(found, nan=1.0), 1 - _TAIL))
    return Rho(value, low, high, len(pairs), len(drawn))


def _check_same_requests(signatures: Values, decode: Values, pairs: Pairs) -> None:
    if len(signatures) != len(decode):
        raise InputError(f"quality: signatures of {len(signatures)} requests, decode counts of {len(decode)}")
    _check_pairs(pairs, len(signatures))


def _draws(requests: int, resamples: int, rng: np.random.Generator) -> Iterator[Positions]:
    for _ in range(resamples):
        yield np.bincount(rng.integers(requests, size=requests), minlength=requests)


@dataclass(frozen=True, slots=True)
class _Side:
    """Keys of P pairs, prepared for ranking under many weights: nothing is sorted twice."""

    order: Positions  # pairs by ascending key
    below: Positions  # of each pair: how many have a smaller key
    through: Positions  # and how many one that is not larger

    @classmethod
    def of(cls, keys: Keys) -> _Side:
        order = np.argsort(keys)
        ordered = keys[order]
        return cls(order, np.searchsorted(ordered, keys, "left"), np.searchsorted(ordered, keys, "right"))

    def ranks(self, weights: Positions) -> Floats:
        """Twice the average rank of each pair, if pair p stood there `weights[p]` times; less their mean."""
        total = np.concatenate(([0], np.cumsum(weights[self.order])))
        ranks = total[self.below]
        ranks += total[self.through]
        ranks -= total[-1]
        return ranks.astype(np.float64)


def _weighted(a: _Side, b: _Side, weights: Positions) -> float:
    """Spearman's correlation, if pair p stood there `weights[p]` times."""
    x, y = a.ranks(weights), b.ranks(weights)
    often = np.sqrt(weights)
    return _correlation(often * x, often * y)


# --- layer selection ----------------------------------------------------------------------------------


def select_layers(features: Values, decode: Values, pairs: Pairs) -> LayerSelection:
    """Choose the layers whose signatures foretell decoding best, greedily (ELDR section 1.3, Figure 8).

    Start with none.  In each round try each layer that is left beside those taken, and take the one with the largest
    rho, the lowest-numbered among equals; go on until all are taken, then cut where rho first was largest.  A trial
    needs no pass over the features, for the cosine of a pair is made of sums over layers:

        cos(i, j) = sum_l dot[l](i, j) / sqrt( sum_l sq[l](i) * sum_l sq[l](j) )

    What is left to do in each of the L (L + 1) / 2 trials is to rank the P cosines.

    A trial whose rho is not defined comes after all others.  Where none is (fewer than two pairs, or decode counts that
    are all equally far apart), nothing speaks against any layer: all are kept, and rho is nan.

    The same input gives the same bytes, whatever the number of threads.  Memory beside the input: 8 L (P + N) bytes,
    and some blocks.

    Args:
        features: `[N, L, E]`, before any norm (`SignatureTransform.features` over all layers).
        decode: `[N, ...]` counts of output tokens, all layers.
        pairs: `[P, 2]`.

    Raises:
        InputError: the two are not of the same requests, a pair is not of two of them, or a value is not finite.
    """
    if features.ndim != 3 or 0 in features.shape[1:]:
        raise InputError(f"quality: features of shape {features.shape} are not [N, L, E]")
    _check_same_requests(features, decode, pairs)
    ranks = _ranks(_pair_keys(decode, pairs))
    parts = [_dots(features[:, layer], pairs) for layer in range(features.shape[1])]
    order, curve = _greedy_order(parts, _sides(pairs), ranks)
    peak = len(curve) - 1 if all(map(isnan, curve)) else _first_best(curve)
    return LayerSelection(tuple(sorted(order[: peak + 1])), curve[peak], tuple(order), tuple(curve))


def _greedy_order(
    parts: Sequence[tuple[Floats, Floats]], sides: tuple[Positions, Positions], ranks: Floats
) -> tuple[list[int], list[float]]:
    left, order, curve = list(range(len(parts))), [], []
    taken_dots, taken_squares = np.zeros_like(parts[0][0]), np.zeros_like(parts[0][1])
    while left:
        trials = (_keys(taken_dots + parts[n][0], taken_squares + parts[n][1], *sides) for n in left)
        rhos = [_key_rho(keys, ranks) for keys in trials]
        best = _first_best(rhos)
        curve.append(rhos[best])
        order.append(left.pop(best))
        dots, squares = parts[order[-1]]
        taken_dots += dots
        taken_squares += squares
    return order, curve


def _key_rho(keys: Keys, ranks: Floats) -> float:
    order = _key_order(keys)
    return _correlation(_ranks_in_order(keys[order]), ranks[order])


def _key_order(keys: Keys) -> Positions:
    """Argsort, in two passes over 16 bits: numpy sorts 16-bit numbers by radix, much faster than wider ones."""
    low = np.argsort(keys.astype(np.uint16), kind="stable")
    high = (keys >> np.uint32(16)).astype(np.uint16)[low]
    return low[np.argsort(high, kind="stable")]


def _first_best(rhos: Sequence[float]) -> int:
    return max(range(len(rhos)), key=lambda n: -inf if isnan(rhos[n]) else rhos[n])
