"""Routing tables from what a monitor tells."""

from __future__ import annotations

import logging
import time

from coterie.core import ModelGeometry
from coterie.errors import EngineError
from coterie.experts.client.table import RoutingTable, Server
from coterie.experts.follower import Follower
from coterie.experts.members import SHORT, Member, best_owners, lacking
from coterie.experts.view import View

_log = logging.getLogger("coterie.experts")


class MonitoredDirectory:
    """Follows a monitor, and makes a routing table of each change, in the follower's thread; see `table.Directory`.

    Args:
        monitor: its URL.
        geometry: of the model.
        fingerprint: of its experts; see `ExpertFiles.fingerprint`.
        name: of the client, for people.

    Raises:
        ConfigError: `monitor` is no URL.
    """

    def __init__(self, monitor: str, geometry: ModelGeometry, fingerprint: str, name: str) -> None:
        self._geometry, self._fingerprint = geometry, fingerprint
        self._now = View(), routing_table(View(), geometry, fingerprint, tokens=1)
        self._follower = Follower(monitor, name, self._take)
        self._follower.start()

    def table(self) -> RoutingTable:
        """The newest one."""
        return self._now[1]

    def await_newer(self, table: RoutingTable, until_s: float) -> None:
        """Return when there is a newer one than this, or at this moment of `time.monotonic`."""
        view, newest = self._now
        if newest is table:
            self._follower.await_newer(view, until_s - time.monotonic())

    def await_all(self, until_s: float) -> None:
        """Return when every expert has a server.

        Raises:
            EngineError: it is not so at this moment of `time.monotonic`; the message says what is missing.
        """
        while True:
            view, table = self._now  # once: what comes after it must end the wait
            if (problem := self._problem(view, table)) is None:
                return
            if time.monotonic() >= until_s:
                raise EngineError(problem)
            self.await_newer(table, until_s)

    def doubt(self, server: Server, *, gone: bool) -> None:
        """Tell the monitor that a server does not reply."""
        for member in self._now[0].all:
            if member.server.address == server.address:
                self._follower.report(member.server.id, dead=gone)

    def close(self) -> None:
        """Follow no longer."""
        self._follower.close()

    def _take(self, view: View) -> None:
        for member in view.all:
            if not _fits(member, self._geometry, self._fingerprint) and member.server.id not in self._now[0].members:
                _log.error(
                    "expert server %s is of another model: it serves %s, this client's has the fingerprint %s",
                    member.server.name,
                    member.server.serves,
                    self._fingerprint[:SHORT],
                )
        self._now = view, routing_table(view, self._geometry, self._fingerprint, tokens=self.table().tokens)

    def _problem(self, view: View, table: RoutingTable) -> str | None:
        """Why not every expert has a server."""
        missing = lacking(table.owners)
        if not missing:
            return None
        known = ", ".join(f"{member.server.name} ({member.state}) of {member.server.serves}" for member in view.all)
        why = self._follower.problem or f"the monitor knows {known or 'none'}"
        layer, expert = missing[0]
        return (
            f"{len(missing)} experts of {self._geometry}, fingerprint {self._fingerprint[:SHORT]}, have no server, "
            f"layer {layer} expert {expert} first; {why}; start servers of them, with this client's checkpoint: "
            "coterie experts serve MODEL --experts WHICH --monitor URL"
        )


def routing_table(view: View, geometry: ModelGeometry, fingerprint: str, *, tokens: int) -> RoutingTable:
    """Whom to ask for what: of each expert's servers those that serve, else those that drain, else suspects.

    Args:
        view: servers; those of another model are left out.
        geometry: of the model.
        fingerprint: of its experts.
        tokens: most tokens of a request, if there is no server that says so.
    """
    members = [member for member in view.all if _fits(member, geometry, fingerprint)]
    if not members:
        return RoutingTable(view.epoch, tokens, (((),) * geometry.experts,) * geometry.layers)
    servers = {one.id: Server(one.name, one.address, one.url) for one in (member.server for member in members)}
    owners = tuple(
        tuple(tuple(sorted(servers[one.id] for one in some)) for some in layer) for layer in best_owners(members)
    )
    return RoutingTable(view.epoch, min(member.server.tokens for member in members), owners)


def _fits(member: Member, geometry: ModelGeometry, fingerprint: str) -> bool:
    return member.server.kind == (fingerprint, geometry.layers, geometry.experts)
