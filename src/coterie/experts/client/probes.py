"""Empty requests to servers that are not good: the reply says that they are again."""

from __future__ import annotations

import logging

import numpy as np

from coterie.errors import EngineError, WireError
from coterie.experts.client.links import Link, Links, Pending
from coterie.experts.client.standing import Servers, Standing
from coterie.experts.client.table import Server
from coterie.experts.protocol import Request

log = logging.getLogger("coterie.experts")


class Probes:
    """Probes that are under way, one for each server at most: it stays in its slot until the server wakes up."""

    def __init__(self, links: Links, servers: Servers, hidden: int, every_s: float) -> None:
        self._links, self._servers, self._every_s = links, servers, every_s
        self._nothing = np.zeros((1, hidden), np.float32), np.full((1, 1), -1, np.int32), np.zeros((1, 1), np.float32)
        self._pending: dict[Server, tuple[Link, Pending]] = {}

    def start(self, now_s: float, epoch: int, owner: int) -> None:
        """Send those that are due."""
        for server in self._servers.to_probe(now_s, self._every_s):
            if server not in self._pending:
                try:
                    link = self._links.take(server)
                except (EngineError, WireError):
                    continue  # as lost as before
                self._pending[server] = link, link.post(Request(0, epoch, owner, *self._nothing))

    def hear(self) -> None:
        """Believe the servers that replied, be it that they are of another epoch."""
        for server, (link, pending) in tuple(self._pending.items()):
            try:
                reply = pending.look(0.0)
            except (EngineError, WireError) as error:
                del self._pending[server]
                self._links.drop(server)
                self._servers.judge(server, Standing.LOST, str(error))
                continue
            if reply is not None:
                del self._pending[server]
                self._links.give_back(server, link)
                if self._servers.judge(server, Standing.GOOD):
                    log.info("expert server %s replies again", server.name)

    def drop(self, server: Server) -> None:
        """Want no reply of a server any more."""
        if server in self._pending:
            link, pending = self._pending.pop(server)
            pending.withdraw()
            link.close()

    def close(self) -> None:
        """Want no reply any more."""
        for server in tuple(self._pending):
            self.drop(server)
