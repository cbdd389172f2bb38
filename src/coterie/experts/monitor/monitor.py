"""The monitor without its HTTP side: hears events, keeps the members, tells the followers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec

from coterie.clock import Clock
from coterie.errors import InputError
from coterie.experts.members import Member
from coterie.experts.membership import Action, Changed, Event, Membership, Settled, Timing
from coterie.experts.monitor.demand import Demand, suggest
from coterie.experts.monitor.log import ChangeLog
from coterie.experts.monitor.messages import BEAT_S, Load, Suggestion
from coterie.experts.view import AllKnown, Beat, Change, Message, Snapshot

_log = logging.getLogger("coterie.experts")

MAX_FOLLOWERS = 1024
_BACKLOG = 256  # lines that a follower may be behind; then it is cut off, and comes back for the rest


class Monitor:
    """Members, their load, and the followers.

    Args:
        timing: how long to wait for what.
        clock: the time.
        run: names this process among the monitors that there were.
        epoch: the first epoch, above those of earlier monitors.

    Attributes:
        membership: who is there.
        demand: what they have to do.
        run: as given.
    """

    def __init__(self, timing: Timing, clock: Clock, *, run: str, epoch: int) -> None:
        self.run = run
        self.demand = Demand()
        self._clock = Awake(clock, timing.heartbeat_s)
        self._started_s = self._clock.now()
        self.membership = Membership(timing, epoch=epoch, now=self._started_s)
        self._log = ChangeLog(epoch)
        self._followers: set[asyncio.Queue[bytes | None]] = set()

    @property
    def up_s(self) -> float:
        """How long it has been up, and awake."""
        return self._clock.now() - self._started_s

    def silent_s(self, key: str) -> float:
        """How long nothing was heard of the server with this id."""
        return self.membership.silent_s(key, self._clock.now())

    def state_s(self, key: str) -> float:
        """How long the server with this id has been in its state."""
        return self.membership.state_s(key, self._clock.now())

    def hear(self, event: Event) -> Action | None:
        """Take in an event, and tell the followers what follows from it.

        Returns:
            The answer to who sent it; None to a tick.
        """
        answer = None
        for action in self.membership.on(event, self._clock.now()):
            if isinstance(action, Changed):
                _log_change(action)
                self._tell(Change(epoch=action.epoch, member=action.member))
            elif isinstance(action, Settled):
                self._tell(AllKnown(epoch=action.epoch))
            else:
                answer = action
        return answer

    def weigh(self, key: str, load: Load) -> None:
        """Take in the load of a living server.

        Raises:
            InputError: it is not that of its experts.
        """
        living = {member.server.id: member.server for member in self.membership.living}
        self.demand.report(living[key], load, self._clock.now())
        self.demand.forget_all_but(set(living))

    def serving(self) -> list[Member]:
        """The members that serve."""
        return [member for member in self.membership.members if member.state == "serving"]

    def suggestion(self) -> Suggestion:
        """A placement for the load of late.

        Raises:
            InputError: there is no server or no load, or they have fewer places than there are experts.
        """
        servers = [member.server for member in self.serving()]
        if not servers:
            raise InputError("placement: no server serves")
        return suggest(servers, self.demand.rates(servers))

    # --- followers -------------------------------------------------------------------------------------

    @property
    def followers(self) -> int:
        """How many are told of changes."""
        return len(self._followers)

    async def follow(self, run: str, after: int) -> AsyncIterator[bytes]:
        """What to tell a follower: lines of JSON, endless.

        Args:
            run: the monitor that it followed before; another means that it needs a snapshot.
            after: the last epoch that it knows.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_BACKLOG)
        first = self.missed(run, after)
        self._followers.add(queue)
        try:
            for message in first:
                yield _line(message)
            while (line := await self._next(queue)) is not None:
                yield line
        finally:
            self._followers.discard(queue)

    def missed(self, run: str, after: int) -> list[Message]:
        """What a follower is told at first; see `follow`."""
        missed = self._log.after(after) if run == self.run else None
        return [self._snapshot()] if missed is None else [Beat(epoch=after), *missed]

    async def _next(self, queue: asyncio.Queue[bytes | None]) -> bytes | None:
        try:
            return await asyncio.wait_for(queue.get(), BEAT_S)
        except TimeoutError:
            return _line(Beat(epoch=self.membership.epoch))

    def dismiss(self) -> None:
        """End the lines of all followers."""
        for queue in list(self._followers):
            self._cut_off(queue)

    def _snapshot(self) -> Snapshot:
        membership = self.membership
        return Snapshot(run=self.run, epoch=membership.epoch, settled=membership.settled, members=membership.living)

    def _tell(self, change: Change | AllKnown) -> None:
        self._log.add(change)
        line = _line(change)
        for queue in list(self._followers):
            if queue.full():
                self._cut_off(queue)
            else:
                queue.put_nowait(line)

    def _cut_off(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._followers.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


class Awake:
    """A clock that stands still while this process does not run, so that servers are not blamed for its own pauses.

    Args:
        clock: the time; read through this one at least every `step_s`, or slower time passes.
        step_s: the longest step between two readings.
    """

    def __init__(self, clock: Clock, step_s: float) -> None:
        self._clock, self._step_s = clock, step_s
        self._last_s = clock.now()
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the first reading for which the process was awake."""
        now_s = self._clock.now()
        self._now_s += min(now_s - self._last_s, self._step_s)
        self._last_s = now_s
        return self._now_s


def _log_change(change: Changed) -> None:
    member = change.member
    level = logging.WARNING if member.state in ("suspect", "dead") else logging.INFO
    why = f": {member.reason}" if member.reason else ""
    _log.log(level, "epoch %d: %s (%s) is %s%s", change.epoch, member.server.name, member.server.id, member.state, why)


def _line(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"
