"""Connections to servers, each for one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coterie.experts.client.table import Server
from coterie.experts.protocol import Reply, Request


class Pending(Protocol):
    """A request that was posted."""

    def look(self, until_s: float) -> Reply | None:
        """The reply, if it comes by then (of `time.monotonic`); without it, the request is still wanted.

        Raises:
            EngineError: the server died; a `GoneError`, if that is certain.
            WireError: the reply cannot be read.

        After each of them the request is withdrawn.
        """
        ...

    def withdraw(self) -> None:
        """Want no reply any more; the next request can be posted."""
        ...


class Link(Protocol):
    """A connection."""

    def post(self, request: Request) -> Pending:
        """Send a request, and do not wait."""
        ...

    def close(self) -> None:
        """Leave the connection to others."""
        ...


Connect = Callable[[Server], Link]
"""Raises `EngineError` or `WireError` where there is no such server, or it takes no more clients."""


class Links:
    """Connections that are free for the next request; others are made on demand."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._free: dict[Server, list[Link]] = {}

    def take(self, server: Server) -> Link:
        """A connection to a server."""
        free = self._free.get(server)
        return free.pop() if free else self._connect(server)

    def is_free(self, server: Server) -> bool:
        """Whether there is a connection to a server for the next request."""
        return bool(self._free.get(server))

    def give_back(self, server: Server, link: Link) -> None:
        """A connection whose request was replied to, or withdrawn."""
        self._free.setdefault(server, []).append(link)

    def drop(self, server: Server) -> None:
        """Close the free connections to a server."""
        for link in self._free.pop(server, ()):
            link.close()

    def close(self) -> None:
        """Close all that are free."""
        for server in tuple(self._free):
            self.drop(server)
