"""Random, domain and cluster batches, compared by the experts that they activate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.analysis.active import DecodeUse
from coterie.analysis.correlation import Floats, Indices
from coterie.errors import InputError

BATCH_SIZES = (8, 32, 64, 128)
DRAWS = 120
RANDOM = "random"

Pools = Mapping[str, Indices]
"""Requests by the name of the domain, cluster or whatever else they are drawn from."""

_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % confidence interval.

    Attributes:
        value: the figure.
        low: lower end of the interval.
        high: upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PoolActive:
    """Batches drawn from one pool.

    Attributes:
        pool: name of the domain or cluster.
        requests: its size n.
        active: active experts per layer and step; None where n <= B.
    """

    pool: str
    requests: int
    active: Estimate | None


@dataclass(frozen=True, slots=True)
class ActiveExperts:
    """Batches of one size under one placement.

    Attributes:
        placement: how requests come together: `random`, `domain` or `cluster`.
        batch: size B.
        active: active experts per layer and step, mean over the measurable pools weighted by their requests; None
            if no pool is measurable.
        reduction: 1 - active / active of random batches of this size; None for these themselves, or if not known.
        coverage: share of the placement's requests that are in measurable pools.
        reason: why pools were left out; empty if none was.
        pools: each pool by itself.
    """

    placement: str
    batch: int
    active: Estimate | None
    reduction: Estimate | None
    coverage: float
    reason: str
    pools: tuple[PoolActive, ...]


def active_experts(
    use: DecodeUse,
    placements: Mapping[str, Pools],
    rng: np.random.Generator,
    *,
    sizes: Sequence[int] = BATCH_SIZES,
    draws: int = DRAWS,
) -> tuple[ActiveExperts, ...]:
    """Compare placements by the experts that their batches activate.

    A batch is B different requests of one pool: drawn with replacement, a small pool would repeat requests
    and look better than it is.  A pool of n requests is measurable if n > B.

    The standard error of a pool's mean counts that draws are finitely many, and that other requests might
    have been recorded:

        error^2 = s^2 * (B / (n - B) + 1 / draws),   s^2 = variance of single batches

    B / (n - B) undoes the shrinking of s^2 by drawing without replacement, and takes the mean over all batches
    for the mean of n / B independent ones.  That is exact for sums over requests; for unions it errs on the
    wide side (Hoeffding 1948: the variance of such a mean is at most B / n times that of one batch).

    Args:
        use: what the requests used.
        placements: pools of each placement; `random` is what the others are compared with.
        rng: source of the batches; each placement and size has its own stream.
        sizes: batch sizes B.
        draws: batches of each placement and size, divided among its measurable pools (at least 2 each).

    Returns:
        One for each size and placement, in that order.

    Raises:
        InputError: no `random` among the placements, fewer than 2 draws, or a size below 1.
    """
    if min(sizes, default=1) < 1:
        raise InputError(f"active experts: a batch of {min(sizes)} requests; at least 1")
    if RANDOM not in placements or draws < 2:
        raise InputError(f"active experts: placements {list(placements)} lack {RANDOM!r}, or {draws} draws are too few")
    cells = [(size, name) for size in sizes for name in placements]
    streams = rng.spawn(len(cells))
    drawn = [_draw(placements[name], size, draws, stream) for (size, name), stream in zip(cells, streams, strict=True)]
    batches = [batch for pools in drawn for some in pools.values() for batch in some]
    means = iter(use.active(batches).mean(axis=1) if batches else ())
    found = [
        _summary(name, size, placements[name], {pool: _take(means, len(some)) for pool, some in pools.items()})
        for (size, name), pools in zip(cells, drawn, strict=True)
    ]
    random = {one.batch: one.active for one in found if one.placement == RANDOM}
    return tuple(one if one.placement == RANDOM else _compared(one, random[one.batch]) for one in found)


def _draw(pools: Pools, size: int, draws: int, rng: np.random.Generator) -> dict[str, list[Indices]]:
    """Batches of each pool that has more than `size` requests."""
    measurable = [name for name, members in pools.items() if len(members) > size]
    each = max(2, math.ceil(draws / max(len(measurable), 1)))
    return {name: [rng.choice(pools[name], size, replace=False) for _ in range(each)] for name in measurable}


def _take(values: Iterator[float], count: int) -> Floats:
    return np.fromiter(values, np.float64, count)


def _summary(name: str, size: int, pools: Pools, values: Mapping[str, Floats]) -> ActiveExperts:
    requests = {pool: len(members) for pool, members in pools.items()}
    covered = sum(requests[pool] for pool in values)
    errors = {pool: _error(some, size, requests[pool]) for pool, some in values.items()}
    weights = {pool: requests[pool] / covered for pool in values}
    mean = sum(weights[pool] * float(some.mean()) for pool, some in values.items())
    error = math.sqrt(sum((weights[pool] * errors[pool]) ** 2 for pool in values))
    each = tuple(
        PoolActive(pool, n, _estimate(float(values[pool].mean()), errors[pool]) if pool in values else None)
        for pool, n in requests.items()
    )
    total = sum(requests.values())
    reason = _reason(name, size, [pool for pool in requests if pool not in values], len(requests))
    coverage = covered / total if total else 0.0
    return ActiveExperts(name, size, _estimate(mean, error) if values else None, None, coverage, reason, each)


def _error(values: Floats, size: int, requests: int) -> float:
    return float(values.std(ddof=1)) * math.sqrt(size / (requests - size) + 1 / len(values))


def _estimate(value: float, error: float) -> Estimate:
    return Estimate(value, value - _NORMAL_95 * error, value + _NORMAL_95 * error)


def _reason(name: str, size: int, small: list[str], pools: int) -> str:
    if not small:
        return ""
    if name == RANDOM:
        return f"a batch of {size} needs more than {size} requests"
    return f"{len(small)} of {pools} {name}s have not more than {size} requests"


def _compared(one: ActiveExperts, random: Estimate | None) -> ActiveExperts:
    """With its reduction against random batches; the two errors are taken as independent."""
    if one.active is None or random is None:
        return one
    ratio = one.active.value / random.value
    relative = math.hypot(*((part.high - part.value) / part.value for part in (one.active, random)))
    reduction = Estimate(1 - ratio, 1 - ratio * (1 + relative), 1 - ratio * (1 - relative))
    return ActiveExperts(one.placement, one.batch, one.active, reduction, one.coverage, one.reason, one.pools)
