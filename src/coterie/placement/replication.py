"""How many replicas each expert gets."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate


def replicate(load: Sequence[float], slots: Sequence[int]) -> list[int]:
    """Give every spare slot to the expert whose replicas have most to do (DeepSeek EPLB, "redundant experts").

    Every expert gets at least one replica, and no more than can be on different ranks.  Under that condition this is
    the best there is: no other numbers of replicas have a smaller largest load per replica.

    Which numbers can be spread over ranks without a rank holding an expert twice is known (Gale 1957, Ryser 1957).
    With the ranks in falling order of slots, for every m:

        replicas beyond the m-th of their expert  <=  slots of the ranks beyond the m-th

    `spare[m]` is the right side less the left.  One more replica of an expert that has c lowers it for m = 0 to c, so
    an expert may have as many replicas as there are leading values above 0.

    Args:
        load: `[E]`.
        slots: `[R]` of each rank, from 1 to E; E in all at least.

    Returns:
        `[E]`, which sum to the slots.
    """
    spare = _sums_from(sorted(slots, reverse=True))
    spare[0] -= len(load)
    replicas = [1] * len(load)
    busiest = [(-one, 1, expert) for expert, one in enumerate(load)]  # without load, who has fewer comes first
    heapq.heapify(busiest)
    while spare[0]:
        _, count, expert = busiest[0]
        if count >= spare.index(0):
            heapq.heappop(busiest)  # for good: the limit only falls
            continue
        for m in range(count + 1):
            spare[m] -= 1
        replicas[expert] = count + 1
        heapq.heapreplace(busiest, (-load[expert] / (count + 1), count + 1, expert))
    return replicas


def _sums_from(values: Sequence[int]) -> list[int]:
    """Sum of the values from each place on; one place more, whose sum is 0."""
    return [*accumulate(reversed(values), initial=0)][::-1]
