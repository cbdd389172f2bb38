"""The one policy protocol, used by the gateway and by every simulation alike.

A policy reads a request and the state of the workers and returns a `Decision`.  It changes nothing
outside itself: who holds what is written by the ledger alone.  Time and chance are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec.structs import replace

from coterie.core import Decision, Role, RouteRequest, WorkerState
from coterie.errors import NoWorkerError
from coterie.routing.filters import Filter, apply_filters
from coterie.routing.sessions import same_worker


class Reads(Enum):
    """What a policy needs to know of a request; the rest is not computed for it."""

    COUNTS = "counts"
    PROMPT_HASH = "prompt_hash"

    __hash__ = object.__hash__  # each is there once; `Enum` hashes its name, in Python


class Policy(Protocol):
    """Chooses a worker for a request."""

    @property
    def name(self) -> str:
        """Name on the command line and in metrics."""
        ...

    @property
    def reads(self) -> frozenset[Reads]:
        """Parts of the request that the policy looks at."""
        ...

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose among `workers`, all available and at least one."""
        ...


@runtime_checkable
class Shown(Protocol):
    """A policy that can say how it stands."""

    def figures(self, now_s: float) -> dict[str, float]:
        """Numbers by name; those that only grow end in `_total`, all others may go up and down.

        Args:
            now_s: by the ledger's clock.
        """
        ...


def route(
    policy: Policy,
    request: RouteRequest,
    workers: Sequence[WorkerState],
    rng: np.random.Generator,
    filters: Sequence[Filter] = (),
) -> Decision:
    """Apply `policy` to the available workers.

    Unavailable workers are left out before the policy sees them, so no policy can fall back to one.  So are those that
    the filters pass over, as long as one is left.  A conversation stays with its worker if it may (`same_worker`).

    Raises:
        NoWorkerError: no worker is available.
    """
    available = [worker for worker in workers if worker.available]
    if not available:
        names = ", ".join(worker.name for worker in workers) or "none configured"
        raise NoWorkerError(f"no worker is available ({names})")
    kept, passed_over = apply_filters(filters, available) if filters else (available, ())
    decision = same_worker(request, kept) or policy.choose(request, kept, rng)
    return replace(decision, passed_over=passed_over) if passed_over else decision


def random_stream(seed: int, role: Role, process: int = 0) -> np.random.Generator:
    """The stream of chance for the policy of one role: the same in the gateway and in the simulator.

    The processes of one gateway have different ones, or they would all draw the same workers.
    """
    words = [seed, 0 if role == "prefill" else 1]
    return np.random.default_rng([*words, process] if process else words)


def least_loaded(workers: Sequence[WorkerState]) -> WorkerState:
    """The worker with the fewest requests in flight; ties go to the least recently assigned."""
    return min(workers, key=lambda worker: (worker.requests, worker.assigned, worker.name))
