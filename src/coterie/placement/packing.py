"""Which rank gets which experts, when it is known how many replicas each has."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt


def pack(weights: Sequence[float], replicas: Sequence[int], slots: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Fill the ranks' slots so that their loads are even, each expert on as many different ranks as it has replicas.

    Balanced packing as in DeepSeek's EPLB: the heaviest first, each to the lightest ranks that have room.  Where that
    would leave a later expert too few ranks with room, it goes to those with most room instead, which never does
    (Ryser's construction).

    Args:
        weights: `[E]` load of one replica of each expert.
        replicas: `[E]`, as `replication.replicate` gives them for the same slots.
        slots: `[R]` of each rank.

    Returns:
        `[R, E]`: whether a rank holds an expert.
    """
    holds = np.zeros((len(slots), len(weights)), bool)
    room, loads = list(slots), [0.0] * len(slots)
    for expert, needs in _heaviest_first(weights, replicas):
        count = replicas[expert]
        for rank in _lightest(loads, room, count, needs) or _roomiest(loads, room, count):
            holds[rank, expert] = True
            loads[rank] += weights[expert]
            room[rank] -= 1
    return holds


def _heaviest_first(weights: Sequence[float], replicas: Sequence[int]) -> Iterable[tuple[int, list[int] | None]]:
    """Experts, and what those after each need: how many replicas they may have at most on m ranks, for m from 1.

    None where those after it have one replica each: any room will do for them.
    """
    order = sorted(range(len(weights)), key=lambda expert: -weights[expert])
    most = max(replicas)
    needs = [0] * most
    several = sum(count > 1 for count in replicas)
    for expert in order:
        for m in range(replicas[expert]):
            needs[m] += 1
    for expert in order:
        for m in range(replicas[expert]):
            needs[m] -= 1
        several -= replicas[expert] > 1
        yield expert, list(accumulate(needs)) if several else None


def _lightest(loads: Sequence[float], room: Sequence[int], count: int, needs: Sequence[int] | None) -> list[int] | None:
    """The lightest ranks with room; None if the experts that follow could not all be placed then."""
    having = [rank for rank, free in enumerate(room) if free]
    chosen = (
        [min(having, key=loads.__getitem__)] if count == 1 else heapq.nsmallest(count, having, key=loads.__getitem__)
    )
    return chosen if needs is None or _fits(room, chosen, needs) else None


def _fits(room: Sequence[int], chosen: Sequence[int], needs: Sequence[int]) -> bool:
    """Whether for every m, the m ranks with most room have no more of it than may be filled (Gale-Ryser)."""
    left = list(room)
    for rank in chosen:
        left[rank] -= 1
    left.sort(reverse=True)
    return all(free <= need for free, need in zip(accumulate(left), needs, strict=False))


def _roomiest(loads: Sequence[float], room: Sequence[int], count: int) -> list[int]:
    return heapq.nsmallest(count, range(len(room)), key=lambda rank: (-room[rank], loads[rank]))
