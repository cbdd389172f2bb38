"""The one writer: who holds what, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from coterie.core import RouteRequest, WorkerState
from coterie.errors import InputError


class Lease:
    """One request's place on one worker, from its assignment until its release.

    A context manager: leaving the block releases, whether it ended well, failed or was cancelled.

    Attributes:
        worker: name of the worker.
        request: what is held.
    """

    __slots__ = ("_ledger", "request", "worker")

    def __init__(self, ledger: Ledger, worker: str, request: RouteRequest) -> None:
        self._ledger: Ledger | None = ledger
        self.worker = worker
        self.request = request

    @property
    def held(self) -> bool:
        """Whether the lease is still to be released."""
        return self._ledger is not None

    def release(self) -> None:
        """Give the place back; every call after the first does nothing."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class LeaseTotals:
    """Leases of one worker since the start: `given == released + requests in flight`."""

    given: int
    released: int


class Ledger:
    """Counts the requests and tokens that each worker holds.

    Load is what this process itself assigned and has not yet released: it is exact for one gateway and never
    late, whereas polls are seconds old and send bursts to one worker.  Invariants, after every call:

    - a worker's `requests` and `tokens` are the number and the sum of its leases that are held;
    - `assigned` grows with each lease, over all workers, and never falls.

    Not thread-safe: it belongs to one event loop.

    Args:
        targets: the workers at the start, in the order of the profile's centroids; they hold nothing yet.

    Raises:
        InputError: no targets, two of one name, or one that holds something.
    """

    def __init__(self, targets: Sequence[WorkerState]) -> None:
        _check_targets(targets)
        self._states = list(targets)
        self._index = {target.name: i for i, target in enumerate(targets)}
        self._held: list[dict[Lease, None]] = [{} for _ in targets]
        self._released = [0] * len(targets)
        self._given = [0] * len(targets)
        self._sequence = 0

    def states(self) -> tuple[WorkerState, ...]:
        """All workers as they are now, in the order of `targets`; later changes do not show in it."""
        return tuple(self._states)

    def lease(self, worker: str, request: RouteRequest) -> Lease:
        """Assign a request: count it and its prompt plus expected output tokens.

        Raises:
            InputError: no worker has this name.
        """
        i = self._position(worker)
        self._sequence += 1
        self._given[i] += 1
        lease = Lease(self, worker, request)
        self._held[i][lease] = None
        self._count(i, request, +1, assigned=self._sequence)
        return lease

    def held(self, worker: str) -> tuple[RouteRequest, ...]:
        """The requests that a worker holds, oldest first.

        Raises:
            InputError: no worker has this name.
        """
        return tuple(lease.request for lease in self._held[self._position(worker)])

    def set_available(self, worker: str, available: bool) -> None:
        """Say whether a worker can take requests; those it holds stay counted until they are released.

        Raises:
            InputError: no worker has this name.
        """
        i = self._position(worker)
        self._states[i] = replace(self._states[i], available=available)

    def totals(self) -> dict[str, LeaseTotals]:
        """Leases given and released since the start, by worker name."""
        return {name: LeaseTotals(self._given[i], self._released[i]) for name, i in self._index.items()}

    def _release(self, lease: Lease) -> None:
        i = self._index[lease.worker]
        del self._held[i][lease]
        self._released[i] += 1
        self._count(i, lease.request, -1, assigned=self._states[i].assigned)

    def _count(self, i: int, request: RouteRequest, sign: int, *, assigned: int) -> None:
        state = self._states[i]
        self._states[i] = replace(
            state,
            requests=state.requests + sign,
            tokens=state.tokens + sign * (request.prompt_tokens + request.output_tokens),
            assigned=assigned,
        )

    def _position(self, worker: str) -> int:
        if worker not in self._index:
            raise InputError(f"ledger: no worker is named {worker!r}; there are {', '.join(self._index)}")
        return self._index[worker]


def _check_targets(targets: Sequence[WorkerState]) -> None:
    if not targets:
        raise InputError("ledger: no workers; give at least one")
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"ledger: two workers are named {twice!r}; give each its own name")
    for target in targets:
        if target.requests or target.tokens or target.assigned:
            raise InputError(f"ledger: worker {target.name} starts with requests that no lease will release: {target}")
