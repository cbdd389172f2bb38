"""How many requests a worker may hold and still be given one for the sake of what it has in its caches."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core import WorkerState

LOAD_FACTOR = 1.25
"""Times the mean number of requests."""


def load_bound(workers: Sequence[WorkerState]) -> float:
    """Most requests of a worker that may be given one more although others have fewer.

        bound = 1.25 * (sum of requests + 1) / n

    It exceeds the mean, so some worker is always within it.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018); the factor is that of
    ELDR section 1.3.

    Args:
        workers: available workers, at least one.
    """
    return LOAD_FACTOR * (sum(worker.requests for worker in workers) + 1) / len(workers)
