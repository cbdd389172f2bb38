"""The one writer: who holds what, and how much."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from coterie.clock import Clock, SystemClock
from coterie.core import Reading, RouteRequest, Served, WorkerState
from coterie.errors import InputError


class Lease:
    """One request's place on one worker, from its assignment until its release.

    A context manager: leaving the block releases, whether it ended well, failed or was cancelled.

    Attributes:
        worker: name of the worker.
        request: what is held.
        sequence: number of the assignment, over all workers, from 1.
    """

    __slots__ = ("_ledger", "request", "sequence", "worker")

    def __init__(self, ledger: Ledger, worker: str, request: RouteRequest, sequence: int) -> None:
        self._ledger: Ledger | None = ledger
        self.worker = worker
        self.request = request
        self.sequence = sequence

    @property
    def held(self) -> bool:
        """Whether the lease is still to be released."""
        return self._ledger is not None

    def release(self, served: Served | None = None) -> None:
        """Give the place back; every call after the first does nothing.

        Args:
            served: what the worker gave, where it is known and was given to the end.
        """
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger._release(self, served)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@runtime_checkable
class Watcher(Protocol):
    """A policy that keeps something for each lease, such as the sum of what a worker's requests use.

    The ledger tells it of every lease once and of its end once, in order, with the ledger's clock.  A watcher must not
    raise, and must not block: it is called while a request waits.
    """

    def leased(self, lease: Lease, now_s: float) -> None:
        """A request was assigned; the states already count it."""
        ...

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        """A request is over; the states no longer count it."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseTotals:
    """Leases of one worker since it came: `given == released + requests in flight`."""

    given: int
    released: int


@dataclass(frozen=True, slots=True)
class Load:
    """What one or several ledgers hold of a worker; the fields are those of `WorkerState`."""

    requests: int = 0
    tokens: int = 0
    assigned: int = 0


class Others(Protocol):
    """Ledgers that lease the same workers: what they hold together, and where they are shown what this one holds.

    Positions are those of the names last given to `attach`.
    """

    def attach(self, names: Sequence[str]) -> None:
        """These are the workers from now on; `changed` gives what others hold of each that is not `Load()`."""
        ...

    def changed(self) -> Iterable[tuple[int, Load]]:
        """Positions where the others together hold something else than at the last call, and what."""
        ...

    def show(self, position: int, own: Load) -> None:
        """This ledger now holds as much of a worker."""
        ...

    def remember(self, session: str, worker: str) -> None:
        """A conversation's last turn went to this worker."""
        ...

    def recall(self, session: str) -> str | None:
        """The worker of a conversation's last turn, whichever ledger gave it; None where it is not known."""
        ...


class Ledger:
    """Counts the requests and tokens that each worker holds.

    Load is what this process itself assigned and has not yet released: it is exact for one gateway and never
    late, whereas polls are seconds old and send bursts to one worker.  Invariants, after every call:

    - a worker's `requests` and `tokens` are the number and the sum of its leases that are held;
    - `assigned` grows with each lease, over all workers, and never falls;
    - the policy that is followed was told of all held leases of the present targets, and of no others.

    With `others` states show what all hold, as of the last call of `states`; leases and totals stay this one's own.
    `assigned` then counts on from the greatest number seen (Lamport, "Time, Clocks, and the Ordering of Events in a
    Distributed System", 1978): two ledgers may give the same number at once, and agree on all that went before.

    Not thread-safe: it belongs to one event loop.

    Args:
        targets: the workers at the start, in the order of the profile's centroids; they hold nothing yet.
        clock: tells a watcher when; the simulator's own in simulations.
        sessions: conversations whose worker is remembered; the one that had no turn for longest is forgotten.
        others: ledgers of the same workers, which then remember conversations for it too; None where there are none.

    Raises:
        InputError: no targets, two of one name, or one that holds something.
    """

    def __init__(
        self,
        targets: Sequence[WorkerState],
        clock: Clock | None = None,
        *,
        sessions: int = 0,
        others: Others | None = None,
    ) -> None:
        _check_targets(targets)
        self._clock = SystemClock() if clock is None else clock
        self._watcher: Watcher | None = None
        self._states = list(targets)
        self._index = {target.name: i for i, target in enumerate(targets)}
        self._held: list[dict[Lease, None]] = [{} for _ in targets]
        self._released = [0] * len(targets)
        self._given = [0] * len(targets)
        self._sequence = 0
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._most_sessions = sessions
        self._stale_s: dict[int, float] = {}  # when what a worker said is too old
        self._targets = len(self._states)  # the others, behind them, are leaving
        self._others = others
        self._beyond = [Load()] * len(targets)  # what of the states is the others'
        if others is not None:
            others.attach([target.name for target in targets])

    def states(self) -> tuple[WorkerState, ...]:
        """All workers as they are now, in the order of `targets`, those that are leaving last; a snapshot."""
        if self._stale_s:
            self._forget(self._clock.now())
        if self._others is not None:
            self._take_in(self._others)
        return tuple(self._states)

    @property
    def followed(self) -> bool:
        """Whether a policy is told of leases."""
        return self._watcher is not None

    def follow(self, policy: object) -> None:
        """Tell the policy that decides from now on of all leases, first of those that are held; and no other any more.

        A policy that is no `Watcher` is told nothing.
        """
        self._watcher = policy if isinstance(policy, Watcher) else None
        if self._watcher is not None:
            held = (lease for leases in self._held[: self._targets] for lease in leases)
            for lease in sorted(held, key=attrgetter("sequence")):
                self._watcher.leased(lease, self._clock.now())

    def retarget(self, targets: Sequence[WorkerState], policy: object) -> None:
        """Change the workers, and follow a policy made for them, from one call to the next.

        Those that stay, or come back before they were forgotten, keep what they hold and what is known of them; new
        ones hold nothing.  Those that are no longer targets are leaving: they are not available, and what they hold
        counts, but for no policy, until it is released.

        Args:
            targets: the workers from now on, in the order of the profile's centroids.
            policy: see `follow`.

        Raises:
            InputError: as for the first targets; nothing has changed.
        """
        _check_targets(targets)
        known = {name: self._without_others(i) for name, i in self._index.items()}
        states = [known.pop(target.name, target) for target in targets]
        self._place([*states, *(replace(state, available=False) for state in known.values())])
        self._targets = len(targets)
        self.follow(policy)

    def forget(self, worker: str) -> None:
        """Forget a worker that is leaving and holds nothing.

        Raises:
            InputError: no worker has this name, it is a target, or it holds requests.
        """
        i = self._position(worker)
        if i < self._targets or self._held[i]:
            what = "is a target" if i < self._targets else f"holds {len(self._held[i])} requests"
            raise InputError(f"ledger: worker {worker} {what} and cannot be forgotten")
        self._place([self._without_others(j) for j in range(len(self._states)) if j != i])

    def lease(self, worker: str, request: RouteRequest) -> Lease:
        """Assign a request: count it and its prompt plus expected output tokens.

        Raises:
            InputError: no worker has this name.
        """
        i = self._position(worker)
        self._sequence += 1
        self._given[i] += 1
        lease = Lease(self, worker, request, self._sequence)
        self._held[i][lease] = None
        if request.session is not None:
            self._remember(request.session, worker)
        self._count(i, request, +1, assigned=self._sequence)
        if self._watcher is not None and i < self._targets:
            self._watcher.leased(lease, self._clock.now())
        return lease

    def recall(self, request: RouteRequest) -> RouteRequest:
        """The request, with the worker of its conversation's last turn if that is known."""
        if request.session is None:
            return request
        recall = self._sessions.get if self._others is None else self._others.recall
        holder = recall(request.session)
        return request if holder is None else replace(request, holder=holder)

    def held(self, worker: str) -> tuple[RouteRequest, ...]:
        """The requests that a worker holds, oldest first.

        Raises:
            InputError: no worker has this name.
        """
        return tuple(lease.request for lease in self._held[self._position(worker)])

    def own(self) -> dict[str, Load]:
        """What this ledger itself holds, by worker name."""
        return {name: self._own(i) for name, i in self._index.items()}

    def set_available(self, worker: str, available: bool) -> None:
        """Say whether a worker can take requests; those it holds stay counted until they are released.

        Raises:
            InputError: no worker has this name.
        """
        i = self._position(worker)
        self._states[i] = replace(self._states[i], available=available)

    def observe(self, worker: str, reading: Reading, good_for_s: float) -> None:
        """Note what a worker said of itself.  Its state shows it for this many seconds, unless it says something new.

        Raises:
            InputError: no worker has this name.
        """
        i = self._position(worker)
        self._states[i] = replace(self._states[i], reading=reading)
        self._stale_s[i] = self._clock.now() + good_for_s

    def totals(self) -> dict[str, LeaseTotals]:
        """Leases given and released since the start or since the worker came, by worker name."""
        return {name: LeaseTotals(self._given[i], self._released[i]) for name, i in self._index.items()}

    def _release(self, lease: Lease, served: Served | None) -> None:
        i = self._index[lease.worker]
        del self._held[i][lease]
        self._released[i] += 1
        self._count(i, lease.request, -1, assigned=self._states[i].assigned)
        if self._watcher is not None and i < self._targets:
            self._watcher.released(lease, served, self._clock.now())

    def _count(self, i: int, request: RouteRequest, sign: int, *, assigned: int) -> None:
        state = self._states[i]
        self._states[i] = WorkerState(  # by position, not by `replace`, which takes longer
            state.name,
            state.group,
            state.rank,
            state.available,
            state.requests + sign,
            state.tokens + sign * (request.prompt_tokens + request.output_tokens),
            assigned,
            state.reading,
        )
        if self._others is not None:
            self._others.show(i, self._own(i))

    def _own(self, i: int) -> Load:
        state, beyond = self._states[i], self._beyond[i]
        return Load(state.requests - beyond.requests, state.tokens - beyond.tokens, state.assigned)

    def _without_others(self, i: int) -> WorkerState:
        own = self._own(i)
        return replace(self._states[i], requests=own.requests, tokens=own.tokens)

    def _take_in(self, others: Others) -> None:
        for i, load in others.changed():
            state, before = self._states[i], self._beyond[i]
            self._states[i] = replace(
                state,
                requests=state.requests + load.requests - before.requests,
                tokens=state.tokens + load.tokens - before.tokens,
                assigned=max(state.assigned, load.assigned),
            )
            self._beyond[i] = load
            self._sequence = max(self._sequence, load.assigned)

    def _place(self, states: list[WorkerState]) -> None:
        """Let `states`, of this ledger's own load, be the workers, each with what was kept for its name."""
        if self._others is not None:
            self._others.attach([state.name for state in states])
        before = [self._index.get(state.name) for state in states]
        self._states = states
        self._beyond = [Load()] * len(states)
        self._held = [{} if i is None else self._held[i] for i in before]
        self._released = [0 if i is None else self._released[i] for i in before]
        self._given = [0 if i is None else self._given[i] for i in before]
        self._stale_s = {i: self._stale_s[b] for i, b in enumerate(before) if b is not None and b in self._stale_s}
        self._index = {state.name: i for i, state in enumerate(states)}

    def _remember(self, session: str, worker: str) -> None:
        if self._others is not None:
            self._others.remember(session, worker)
            return
        self._sessions[session] = worker
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)

    def _forget(self, now_s: float) -> None:
        for i in [i for i, stale_s in self._stale_s.items() if stale_s <= now_s]:
            del self._stale_s[i]
            self._states[i] = replace(self._states[i], reading=None)

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
