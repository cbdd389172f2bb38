"""Workers that are passed over while others are not, under any policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coterie.core import WorkerState
from coterie.errors import ConfigError
from coterie.routing.bound import load_bound

STALE_AFTER = 3
"""Intervals between readings after which one no longer counts: what was said before a worker fell silent is not now."""

Filter = Callable[[WorkerState], str | None]
"""Why to pass a worker over while another is not passed over: one of few phrases; None to leave it to the policy."""


@dataclass(frozen=True, slots=True)
class KvHeadroom:
    """Passes over a worker whose KV cache is fuller than a limit.

    A decode worker without room makes new requests wait and, when those that it has grow, takes their KV away again.
    Load does not show that: few long requests hold more KV than many short ones.

    Attributes:
        limit: part of the cache that may be held, above 0 and at most 1.

    Raises:
        ConfigError: the limit is out of range.
    """

    limit: float

    def __post_init__(self) -> None:
        if not 0 < self.limit <= 1:
            raise ConfigError(f"the limit of KV usage must be above 0 and at most 1, got {self.limit}")

    def __call__(self, worker: WorkerState) -> str | None:
        """Pass it over if it said so; one that said nothing lately is not passed over."""
        full = worker.reading is not None and worker.reading.kv_usage > self.limit
        return "KV cache is full" if full else None


def no_queue(worker: WorkerState) -> str | None:
    """A `Filter` that passes over a worker where requests wait for room or for a place in the batch."""
    return "requests wait" if worker.reading is not None and worker.reading.waiting else None


def apply_filters(
    filters: Sequence[Filter], workers: Sequence[WorkerState]
) -> tuple[Sequence[WorkerState], tuple[tuple[str, str], ...]]:
    """Leave out workers that filters pass over.

    A filter is not applied, and the next is tried on the same workers, where it would leave none, or only such as
    hold more requests than `load_bound` of all.

    What workers say is old by up to an interval.  Without the bound, all that come in between would be sent to the few
    that had room, and those would be full long before they say so.

    Args:
        filters: the most important first.
        workers: available workers, at least one.

    Returns:
        the workers left, at least one, in their order; and those passed over, by name, with the reason.
    """
    bound = load_bound(workers)
    passed: list[tuple[str, str]] = []
    for filter_ in filters:
        reasons = [(worker, filter_(worker)) for worker in workers]
        kept = [worker for worker, why in reasons if not why]
        if len(kept) < len(workers) and any(worker.requests <= bound for worker in kept):
            passed += [(worker.name, why) for worker, why in reasons if why]
            workers = kept
    return workers, tuple(passed)
