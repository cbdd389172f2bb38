"""Which expert servers there are, and what is thought of each: a state machine without clock or network.

                     ready                  silent, or reported
    register ─▶ joining ─────▶ serving ◀──────────────────────▶ suspect
                   │              │         heard of again         │
                   │ too long     │ about to leave                 │ silent for longer,
                   ▼              ▼                                │ or proof of its end
                 dead ◀────── draining                             │
                   ▲   left, silent for long, proof                │
                   └───────────────────────────────────────────────┘

- A server that *joins* loads weights and may be too busy to be heard of: only `joining_s` bounds it.
- A *suspect* gets nothing new while others own its experts.  It was silent for `suspect_after_s`, or a client said that
  it does not answer; the next heartbeat clears it.
- Silence alone never makes a server *dead* that has an expert which no serving server has: it may be cut off from the
  monitor alone, and there is nobody else to ask.  Proof does: it said that it leaves, or its process is gone.
- A dead server that is heard of again is asked to register, and is back.

Every change raises the membership epoch, so the epoch is also the number of the change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from coterie.errors import ConfigError
from coterie.experts.members import Member, Phase, Server, State, covers


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait for what, in seconds.

    Attributes:
        heartbeat_s: between two heartbeats of a server.
        suspect_after_s: silence after which a server is suspect.
        dead_after_s: silence after which a suspect or draining server is dead, if others have its experts.
        joining_s: the longest that joining may take.
        forget_after_s: how long a dead server is still shown.

    Raises:
        ConfigError: one is not positive, or they are not in order.
    """

    heartbeat_s: float = 0.5
    suspect_after_s: float = 2.0
    dead_after_s: float = 10.0
    joining_s: float = 600.0
    forget_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.suspect_after_s < self.dead_after_s:
            raise ConfigError(
                f"expert monitor: a heartbeat every {self.heartbeat_s:g} s, suspect after {self.suspect_after_s:g} s, "
                f"dead after {self.dead_after_s:g} s; each must be longer than the one before"
            )
        if not (self.joining_s > 0 and self.forget_after_s > 0):
            raise ConfigError("expert monitor: the times for joining and forgetting must be positive")


# --- events and actions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A server is new, has other experts than before, or was asked to register again."""

    server: Server
    phase: Phase
    seen: int = 0  # the highest epoch that it knows of


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A server lives."""

    id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Leave:
    """A server has ended its work and ends."""

    id: str


@dataclass(frozen=True, slots=True)
class Report:
    """A client has no answer from a server; `dead` if it knows for certain that the process is gone."""

    id: str
    by: str
    dead: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Register | Heartbeat | Leave | Report | Tick


@dataclass(frozen=True, slots=True)
class Changed:
    """Tell all clients."""

    epoch: int
    member: Member


@dataclass(frozen=True, slots=True)
class Accepted:
    """Answer the server; `needed` if it has experts that no other serving server has."""

    epoch: int
    since: int
    needed: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer the server: it does not fit the others."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Answer whoever asked: there is no such server, or it was thought dead; it should register."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Tell all clients: every server that lives has registered by now, so who is absent is gone."""

    epoch: int


Action = Changed | Accepted | Refused | Unknown | Settled


@dataclass(slots=True)
class _Record:
    member: Member
    heard_s: float
    since_s: float  # of its state


class Membership:
    """The members of one monitor.

    Args:
        timing: how long to wait for what.
        epoch: the first epoch; must be above those of earlier runs, so take the time of day.
        now: seconds on the caller's clock.
    """

    def __init__(self, timing: Timing, *, epoch: int, now: float) -> None:
        self.timing = timing
        self.epoch = epoch
        self.settled = False
        self._settles_s = now + timing.dead_after_s
        self._records: dict[str, _Record] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """All that are not forgotten, in order of their registration."""
        return tuple(record.member for record in self._records.values())

    @property
    def living(self) -> tuple[Member, ...]:
        """Those that are not dead."""
        return tuple(member for member in self.members if member.state != "dead")

    def silent_s(self, key: str, now: float) -> float:
        """How long nothing was heard of the server with this id."""
        return now - self._records[key].heard_s

    def state_s(self, key: str, now: float) -> float:
        """How long the server with this id has been in its state."""
        return now - self._records[key].since_s

    def on(self, event: Event, now: float) -> tuple[Action, ...]:
        """What follows from an event; `now` never decreases.

        Returns:
            What to tell the clients, in order; last, except for a tick, the answer to who sent the event.
        """
        match event:
            case Register():
                return tuple(self._register(event, now))
            case Heartbeat():
                return tuple(self._heartbeat(event, now))
            case Leave():
                return tuple(self._end(event.id, "it left", now))
            case Report():
                return tuple(self._report(event, now))
            case Tick():
                return tuple(self._tick(now))

    # --- what is heard ---------------------------------------------------------------------------------

    def _register(self, event: Register, now: float) -> Iterator[Action]:
        server = event.server
        if reason := self._misfit(server):
            yield Refused(reason)
            return
        self.epoch = max(self.epoch, event.seen, server.since)
        known = self._records.get(server.id)
        if known and known.member.server.held == server.held:
            server = replace(server, since=known.member.server.since)
        elif not server.since or known:
            server = replace(server, since=self.epoch + 1)
        if known:
            known.heard_s = now
        else:
            self._records[server.id] = _Record(Member(server, "dead"), now, now)
        yield from self._become(server.id, event.phase, now, server=server)
        yield self._accepted(server.id)

    def _misfit(self, server: Server) -> str | None:
        for other in self.living:
            if server.kind != other.server.kind:
                return (
                    f"{server.name} serves {server.serves}, but {other.server.name} {other.server.serves}; one monitor "
                    "has one model: start the server with the same checkpoint, or with another monitor"
                )
        return None

    def _heartbeat(self, event: Heartbeat, now: float) -> Iterator[Action]:
        record = self._living(event.id)
        if record is None:
            yield Unknown()
            return
        record.heard_s = now
        yield from self._become(event.id, event.phase, now)
        yield self._accepted(event.id)

    def _report(self, event: Report, now: float) -> Iterator[Action]:
        record = self._living(event.id)
        if event.dead or record is None:
            yield from self._end(event.id, f"{event.by} saw that its process is gone", now)
            return
        if record.member.state == "serving":
            yield from self._become(event.id, "suspect", now, reason=f"it did not answer {event.by}")
        yield self._accepted(event.id)

    def _end(self, key: str, reason: str, now: float) -> Iterator[Action]:
        if self._living(key) is None:
            yield Unknown()
            return
        yield from self._become(key, "dead", now, reason=reason)
        yield self._accepted(key)

    # --- what is not heard -----------------------------------------------------------------------------

    def _tick(self, now: float) -> Iterator[Action]:
        for key in list(self._records):
            yield from self._grow_impatient(key, now)
        for key in list(self._records):  # after all suspects are known: they do not vouch for each other
            yield from self._give_up(key, now)
        if not self.settled and now >= self._settles_s:
            self.settled = True
            self.epoch += 1
            yield Settled(self.epoch)

    def _grow_impatient(self, key: str, now: float) -> Iterator[Action]:
        record, timing = self._records[key], self.timing
        silent_s, state_s = now - record.heard_s, now - record.since_s
        if record.member.state == "serving" and silent_s >= timing.suspect_after_s:
            yield from self._become(key, "suspect", now, reason=f"silent for {timing.suspect_after_s:g} s")
        elif record.member.state == "joining" and state_s >= timing.joining_s:
            yield from self._become(key, "dead", now, reason=f"not ready after {timing.joining_s:g} s")
        elif record.member.state == "dead" and state_s >= timing.forget_after_s:
            del self._records[key]

    def _give_up(self, key: str, now: float) -> Iterator[Action]:
        record, limit_s = self._records[key], self.timing.dead_after_s
        waits = record.member.state in ("suspect", "draining") and now - record.heard_s >= limit_s
        if waits and covers(self.living, record.member.server):
            yield from self._become(key, "dead", now, reason=f"silent for {limit_s:g} s")

    # --- records ---------------------------------------------------------------------------------------

    def _become(
        self, key: str, state: State, now: float, *, reason: str = "", server: Server | None = None
    ) -> Iterator[Action]:
        record = self._records[key]
        member = Member(server or record.member.server, state, reason)
        if member.state != record.member.state:
            record.since_s = now
        if member != record.member:
            self.epoch += 1
            record.member = member
            yield Changed(self.epoch, member)

    def _living(self, key: str) -> _Record | None:
        record = self._records.get(key)
        return None if record is None or record.member.state == "dead" else record

    def _accepted(self, key: str) -> Accepted:
        member = self._records[key].member
        others = (other for other in self.members if other is not member)
        return Accepted(self.epoch, member.server.since, not covers(others, member.server))
