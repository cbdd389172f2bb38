"""How the replicas of an expert share its load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

EVEN = 1e-5
"""Rounds end when no rank's load changes by more than this part of the largest."""
ROUNDS = 50
"""Rounds at most."""


def share(load: Floats, holds: Bools) -> Floats:
    """Divide each expert's load among its ranks so that the busiest rank has as little to do as the packing allows.

    One expert after the other pours its load over its ranks like water: the lightest are filled first.  Each pouring
    lowers the sum of the squared loads as far as one expert can, and rounds of them lead to the least sum, at which the
    busiest rank is lightest, too (Fujishige 1980, "Lexicographically optimal base of a polymatroid").

    Args:
        load: `[E]`.
        holds: `[R, E]` whether a rank holds an expert.

    Returns:
        `[R, E]`: the part of each expert's load that each rank takes.
    """
    replicas = holds.sum(axis=0)
    parts: Floats = holds * (load / replicas)
    several = np.flatnonzero((replicas > 1) & (load > 0))
    several = several[np.argsort(-load[several], kind="stable")]
    owners = [np.flatnonzero(holds[:, expert]).tolist() for expert in several]
    amounts = [[amount] * len(some) for amount, some in zip((load / replicas)[several].tolist(), owners, strict=True)]
    _pour_in_rounds(owners, amounts, parts.sum(axis=1).tolist())
    for expert, some, amount in zip(several, owners, amounts, strict=True):
        parts[some, expert] = amount
    return parts


def _pour_in_rounds(owners: Sequence[Sequence[int]], amounts: Sequence[list[float]], loads: list[float]) -> None:
    for _ in range(ROUNDS):
        before = list(loads)
        for ranks, parts in zip(owners, amounts, strict=True):
            _pour(ranks, parts, loads)
        if max(abs(now - then) for now, then in zip(loads, before, strict=True)) <= EVEN * max(loads):
            break


def _pour(ranks: Sequence[int], parts: list[float], loads: list[float]) -> None:
    """Pour one expert's load anew over its ranks."""
    for place, rank in enumerate(ranks):
        loads[rank] -= parts[place]
    level = _level(sum(parts), sorted(loads[rank] for rank in ranks))
    for place, rank in enumerate(ranks):
        parts[place] = max(level - loads[rank], 0.0)
        loads[rank] += parts[place]


def _level(amount: float, floors: Sequence[float]) -> float:
    """How high water stands that is poured over floors of width 1, given in ascending order."""
    level = float("inf")
    for wet, floor in enumerate(floors, 1):
        if level <= floor:
            break
        amount += floor
        level = amount / wet
    return level
