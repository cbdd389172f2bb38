"""What a client knows of the expert servers, from what the monitor sends; and the messages it is sent.

A monitor that starts knows no server.  Until it has settled, servers that it does not name are as they were; so neither
its end nor its start takes a server from a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from coterie.experts.members import Member, covers


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """All members.

    Attributes:
        run: the monitor's process.
        epoch: number of the last change.
        settled: whether every server that lives has registered with it.
        members: those that are not dead.
    """

    run: str
    epoch: int
    settled: bool
    members: tuple[Member, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, tag="change"):
    """One member is new, has other experts or another state."""

    epoch: int
    member: Member


class AllKnown(msgspec.Struct, frozen=True, kw_only=True, tag="all_known"):
    """The monitor has settled: every server that lives has registered with it."""

    epoch: int


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Nothing has changed for a while."""

    epoch: int


Message = Snapshot | Change | AllKnown | Beat


@dataclass(frozen=True, slots=True)
class View:
    """The servers that a client may ask.

    Attributes:
        run: the monitor's process that it is from; empty at first.
        epoch: number of the last change in it.
        settled: whether the monitor knows all servers.
        members: by id, those that the monitor named and that are not dead.
        absent: by id, those that only an earlier monitor named; once the present one has settled, those of them that
            have an expert which no server that serves has, as suspects.
    """

    run: str = ""
    epoch: int = 0
    settled: bool = False
    members: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))
    absent: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def all(self) -> tuple[Member, ...]:
        """Members and absent ones."""
        return (*self.members.values(), *self.absent.values())

    def apply(self, message: Message) -> View:
        """The view after a message; one that was seen already changes nothing."""
        match message:
            case Snapshot():
                members = {member.server.id: member for member in message.members}
                others = {member.server.id: member for member in self.all if member.server.id not in members}
                return View(message.run, message.epoch, message.settled, members, others)._without_needless()
            case Change() if message.epoch > self.epoch:
                return self._changed(message.epoch, message.member)
            case AllKnown() if message.epoch > self.epoch:
                return replace(self, epoch=message.epoch, settled=True)._without_needless()
        return self

    def _changed(self, epoch: int, member: Member) -> View:
        key = member.server.id
        members = {**self.members, key: member}
        if member.state == "dead":
            del members[key]
        absent = {other: one for other, one in self.absent.items() if other != key}
        return replace(self, epoch=epoch, members=members, absent=absent)._without_needless()

    def _without_needless(self) -> View:
        if not self.settled or not self.absent:
            return self
        absent = {
            key: Member(one.server, "suspect", "the monitor has not heard of it")
            for key, one in self.absent.items()
            if not covers(self.members.values(), one.server)
        }
        return replace(self, absent=absent)
