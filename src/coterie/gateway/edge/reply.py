"""The reply to a client's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from coterie.gateway.edge.http1 import Header, RefusedError, error_body, response_head
from coterie.gateway.edge.request import Request

if TYPE_CHECKING:
    from coterie.gateway.edge.client import ClientConnection

_CLOSING: Header = (b"connection", b"close")


class Watcher(Protocol):
    """Wants to know whether a client keeps up."""

    def on_full(self) -> None:
        """The client does not keep up."""
        ...

    def on_drained(self) -> None:
        """The client has caught up."""
        ...


class Reply:
    """Writes the reply to one request.

    Attributes:
        request: what is answered.
        connection: what it is written to.
        status: status sent; 0 before the head is sent.
    """

    __slots__ = ("_watcher", "connection", "request", "status")

    def __init__(self, request: Request, connection: ClientConnection) -> None:
        self.request = request
        self.status = 0
        self._watcher: Watcher | None = None
        self.connection = connection

    def watch(self, watcher: Watcher | None) -> None:
        """Tell `watcher` when the client stops keeping up and when it has caught up."""
        self._watcher = watcher
        if watcher is not None and self.connection.full:
            watcher.on_full()

    def notify(self, *, full: bool) -> None:
        """Called by the connection."""
        if self._watcher is not None:
            (self._watcher.on_full if full else self._watcher.on_drained)()

    def start(
        self, status: int, headers: Sequence[Header], first: bytes, *, framed: bool = True, lines: bytes = b""
    ) -> None:
        """Send the head and the first bytes of the body.

        Args:
            status: HTTP status.
            headers: headers, those of the body's framing included.
            first: first bytes of the body, framing included.
            framed: whether they tell where the body ends; if not, the connection's end will.
            lines: complete header lines that go before the headers.
        """
        self.status = status
        if not framed:
            self.request.keep_alive = False
        if not self.request.keep_alive:
            headers = (*headers, _CLOSING)
        head = response_head(status, headers, lines)
        if self.request.method == "HEAD":  # its reply is the head that GET would get
            self.connection.write(head)
        else:
            self.connection.write(head + first)

    def write(self, data: bytes) -> None:
        """Send bytes of the body, framing included."""
        self.connection.write(data)

    def send(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send a complete reply."""
        self.start(status, (*headers, (b"content-length", b"%d" % len(body))), body)

    def send_error(
        self, status: int, message: str, kind: str, headers: Sequence[Header] = (), **details: str | None
    ) -> None:
        """Send an error in the shape of OpenAI's API; see `http1.error_body`."""
        headers = ((b"content-type", b"application/json"), *headers)
        self.send(status, headers, error_body(message, kind, **details))

    def refuse(self, refused: RefusedError, headers: Sequence[Header] = ()) -> None:
        """Send the error of a request that is not taken."""
        headers = (*refused.headers, *headers)
        self.send_error(refused.status, str(refused), refused.kind, headers, code=refused.code)

    def abort(self) -> None:
        """Cut the connection: the only honest end of a reply that cannot be completed."""
        self.connection.abort()
