"""Policies that look at load alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.core import Decision, RouteRequest, WorkerState
from coterie.routing.policy import Reads, least_loaded

NOTHING: frozenset[Reads] = frozenset()


class RoundRobin:
    """Each worker in turn.

        worker = argmin assigned

    The next one is the one whose last assignment is longest ago.  The turn is read from the workers' states,
    not counted here, so a worker that was away simply takes the next request when it is back.  Reads neither
    load nor request.
    """

    name = "round_robin"
    reads = NOTHING

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the least recently assigned worker."""
        chosen = min(workers, key=lambda worker: (worker.assigned, worker.name))
        return Decision(chosen.name, "round robin")


class Random:
    """Any worker, all equally likely.

        worker ~ uniform(workers)

    Reads neither load nor request.
    """

    name = "random"
    reads = NOTHING

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Draw a worker."""
        return Decision(workers[int(rng.integers(len(workers)))].name, "random")


class LeastLoad:
    """Join the shortest queue.

        worker = argmin requests

    `requests` are those in flight by the ledger's own count: never late, unlike polled queue lengths.  Ties go to
    the least recently assigned, so an idle pool is used evenly.  The request itself is not looked at.

    Args:
        reason: what decisions say; where it stands in for another policy, why.
        detail: the particulars of that.
    """

    name = "least_load"
    reads = NOTHING

    def __init__(self, reason: str = "least load", detail: str = "") -> None:
        self._reason = reason
        self._detail = detail

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the worker with the fewest requests."""
        return Decision(least_loaded(workers).name, self._reason, detail=self._detail)


class PowerOfTwo:
    """The better of two drawn at random.

        worker = argmin requests over two different workers ~ uniform(pairs)

    Nearly as even as the shortest queue, and two gateways that do not know of each other's requests rarely pick
    the same worker.  Ties go to the least recently assigned.  A single worker is taken as it is.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
    """

    name = "power_of_two"
    reads = NOTHING

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Draw two workers and choose the less loaded."""
        if len(workers) == 1:
            return Decision(workers[0].name, "power of two: only one worker")
        first = int(rng.integers(len(workers)))
        other = int(rng.integers(len(workers) - 1))
        drawn = (workers[first], workers[other + (other >= first)])  # skips the first: all pairs are equally likely
        names = tuple(worker.name for worker in drawn)
        return Decision(least_loaded(drawn).name, "power of two", candidates=names)


def load_only(workers: Sequence[WorkerState], why: str, detail: str = "") -> Decision:
    """The least loaded worker, by a policy that could not apply its own rule.

    Args:
        workers: available workers, at least one.
        why: the missing signal, in a fixed phrase.
        detail: what is particular to this request.
    """
    return Decision(least_loaded(workers).name, f"load only: {why}", detail=detail)
