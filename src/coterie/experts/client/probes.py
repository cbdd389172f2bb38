"""Empty requests to servers that are not good: the reply says that they are again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coterie.errors import EngineError, WireError
from coterie.experts.client.links import Link, Links, Pending
from coterie.experts.client.standing import Servers, Standing
from coterie.experts.client.table import Server
from coterie.experts.protocol import Request


class Probes:
    """Probes that are under way, one for each server at most: it stays in its slot until the server wakes up."""

    def __init__(self, links: Links, servers: Servers, hidden: int) -> None:
        self._links, self._servers = links, servers
        self._nothing = np.zeros((1, hidden), np.float32), np.full((1, 1), -1, np.int32), np.zeros((1, 1), np.float32)
        self._pending: dict[Server, tuple[Link, Pending]] = {}

    def start(self, servers: Iterable[Server], epoch: int, owner: int) -> None:
        """Probe servers."""
        for server in servers:
            if server not in self._pending:
                try:
                    link = self._links.take(server)
                except (EngineError, WireError) as error:
                    self._servers.judge(server, Standing.LOST, str(error))
                    continue
                self._pending[server] = link, link.post(Request(0, epoch, owner, *self._nothing))

    def hear(self, until_s: float = 0.0) -> None:
        """Believe the servers that have replied, or do until then, be it that they are of another epoch."""
        for server, (link, pending) in tuple(self._pending.items()):
            try:
                reply = pending.look(until_s)
            except (EngineError, WireError) as error:
                del self._pending[server]
                link.close()
                self._links.drop(server)
                self._servers.judge(server, Standing.LOST, str(error))
                continue
            if reply is not None:
                del self._pending[server]
                self._links.give_back(server, link)
                self._servers.judge(server, Standing.GOOD)
            elif until_s:
                self._servers.judge(server, Standing.SUSPECT, "no reply to a first request")

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
