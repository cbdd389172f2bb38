"""What a client thinks of the servers, and what it has in flight at them.

              patience is over
        GOOD ──────────────────▶ SUSPECT    nothing new while a good server holds the expert
         ▲                          │
         ├───────── reply ──────────┤
         │                          │ died, cannot be reached, or replied what cannot be read (from GOOD, too)
         └───────── reply ──────── LOST     nothing at all while another server holds the expert

No server is ever dropped: the last owner of an expert is asked, whatever is thought of it, and those that are not good
are probed.  Only a server that refused a request, since its experts changed, is not asked again before a newer table
says what it holds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import IntEnum

from coterie.experts.client.table import Owners, Server

_log = logging.getLogger("coterie.experts")


class Standing(IntEnum):
    """What a client thinks of a server, best first."""

    GOOD = 0
    SUSPECT = 1
    LOST = 2


@dataclass(slots=True)
class _Seen:
    standing: Standing = Standing.GOOD
    why: str = ""
    in_flight: int = 0  # pairs of token and expert
    turn: int = 0  # when it was last asked, counted in requests
    probed_s: float = -float("inf")


class Servers:
    """The one writer of standing and load.  A server that was never heard of is good and idle."""

    def __init__(self) -> None:
        self._seen: dict[Server, _Seen] = {}
        self._doubted: set[Server] = set()
        self._outdated: dict[Server, int] = {}  # epoch of the table that is needed to ask it
        self._turns = 0

    def standing(self, server: Server) -> Standing:
        """What is thought of it."""
        return self._of(server).standing

    def usable(self, owners: Owners, epoch: int) -> Owners:
        """Those of the best standing among owners that can be asked by a table of this epoch."""
        if not self._doubted and not self._outdated:
            return owners
        known = [server for server in owners if self._outdated.get(server, 0) <= epoch]
        best = min(map(self.standing, known), default=Standing.GOOD)
        return tuple(server for server in known if self.standing(server) is best)

    def is_good(self, owners: Owners, epoch: int) -> bool:
        """Whether a good one is among the owners."""
        usable = self.usable(owners, epoch)
        return bool(usable) and self.standing(usable[0]) is Standing.GOOD

    def idle(self) -> frozenset[Server]:
        """All that have no request, of those that ever had one."""
        return frozenset(server for server, seen in self._seen.items() if not seen.in_flight)

    def load(self, server: Server) -> tuple[int, int]:
        """Pairs in flight at it, and its last turn: the least is asked first."""
        seen = self._of(server)
        return seen.in_flight, seen.turn

    def sent(self, server: Server, pairs: int) -> None:
        """A request went to it."""
        seen, self._turns = self._of(server), self._turns + 1
        seen.in_flight, seen.turn = seen.in_flight + pairs, self._turns

    def ended(self, server: Server, pairs: int) -> None:
        """A request is not at it any more, however that came."""
        self._of(server).in_flight -= pairs

    def judge(self, server: Server, standing: Standing, why: str = "") -> bool:
        """Think so of it from now on; whether that is news."""
        seen = self._of(server)
        before, seen.standing, seen.why = seen.standing, standing, why
        (self._doubted.discard if standing is Standing.GOOD else self._doubted.add)(server)
        if before is not standing:
            level = logging.INFO if standing is Standing.GOOD else logging.WARNING
            _log.log(level, "expert server %s is %s%s%s", server.name, standing.name.lower(), why and ": ", why)
        return before is not standing

    def outdated(self, server: Server, epoch: int) -> None:
        """It refused a request: a table of this epoch, or later, is needed to ask it again."""
        self._outdated[server] = max(self._outdated.get(server, 0), epoch)

    def updated(self, epoch: int) -> None:
        """There is a table of this epoch."""
        self._outdated = {server: needed for server, needed in self._outdated.items() if needed > epoch}

    def to_probe(self, now_s: float, every_s: float) -> list[Server]:
        """Servers that are not good and have no request, whose last probe was long ago; they count as probed now."""
        due = [server for server in self._doubted if self._is_due(self._of(server), now_s - every_s)]
        for server in due:
            self._of(server).probed_s = now_s
        return due

    def describe(self, server: Server, epoch: int) -> str:
        """Its name, and what speaks against it."""
        seen = self._of(server)
        if (needed := self._outdated.get(server, 0)) > epoch:
            return f"{server.name} (its experts changed at epoch {needed}; the table is of {epoch})"
        return f"{server.name} ({seen.standing.name.lower()}{seen.why and ': '}{seen.why})"

    def forget(self, server: Server) -> None:
        """No table names it any more."""
        self._seen.pop(server, None)
        self._outdated.pop(server, None)
        self._doubted.discard(server)

    @staticmethod
    def _is_due(seen: _Seen, before_s: float) -> bool:
        return seen.in_flight == 0 and seen.probed_s <= before_s

    def _of(self, server: Server) -> _Seen:
        if (seen := self._seen.get(server)) is None:
            seen = self._seen[server] = _Seen()
        return seen
