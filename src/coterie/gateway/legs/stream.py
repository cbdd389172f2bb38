"""Relays a worker's reply to a client, its bytes untouched and no more of them in memory than sockets buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coterie.clock import Clock
from coterie.core import Served
from coterie.gateway.edge.http1 import ChunkedFraming, Framing, Header, ResponseHead, error_body
from coterie.gateway.edge.reply import Reply
from coterie.gateway.legs.retry import RETRIED_STATUS
from coterie.gateway.legs.upstream import Collected, Upstream

MAX_REFUSAL_BYTES = 1 << 20
"""Of a reply that is kept back."""

CHUNKED: tuple[Header, ...] = ((b"transfer-encoding", b"chunked"),)
EVENT_END = b"\n\n"


class Pace:
    """How fast a streamed reply comes, by its events: each but the last (`[DONE]`) is taken for one token.

    That is what vLLM sends; the event of a chat's role, and that of its usage, make one token or two too many.

    Args:
        clock: the one that the ledger reads.
    """

    __slots__ = ("_clock", "_ends", "_last", "_since_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._ends = 0
        self._last = b""

    def add(self, data: bytes) -> None:
        """The next bytes of the body."""
        if self._since_s is None:
            self._since_s = self._clock.now()
        self._ends += (self._last + data).count(EVENT_END)
        self._last = b"" if data.endswith(EVENT_END) else data[-1:]

    def served(self) -> Served | None:
        """What was given, at the end of the reply; None if there were no events."""
        if self._since_s is None or self._ends < 2:
            return None
        return Served(self._ends - 1, self._clock.now() - self._since_s)


class Relay:
    """Takes a decode worker's reply and writes it to the client; a `Consumer`.

    The head is held until the body's first byte, so that a worker that dies between the two can still be
    answered for with a proper error.  The body goes through with its own framing.  HTTP/1.0 knows no chunks,
    so for such a client their data goes through alone.

    Args:
        reply: what the client is sent.
        headers: to be added to the reply's.
        loop: whose clock `first_byte_s` is on.
        pace: is shown the body of a stream; None where nobody wants to know.

    Attributes:
        head: the reply's head; None until it arrived.
        sent: whether the request went out.
        refusal: a reply that was kept back, since another worker may give a better one (`RETRIED_STATUS`).
        first_byte_s: when the body's first byte was relayed, on the loop's clock; None before.
    """

    wanted_late = False

    __slots__ = (
        "_connection",
        "_framing",
        "_headers",
        "_loop",
        "_pace",
        "_payload",
        "_reply",
        "_tail",
        "first_byte_s",
        "head",
        "refusal",
        "sent",
    )

    def __init__(
        self,
        reply: Reply,
        headers: Sequence[Header],
        loop: asyncio.AbstractEventLoop,
        pace: Pace | None = None,
    ) -> None:
        self.head: ResponseHead | None = None
        self.sent = False
        self.refusal: Collected | None = None
        self.first_byte_s: float | None = None
        self._reply = reply
        self._headers = headers
        self._loop = loop
        self._pace = pace
        self._connection: Upstream | None = None
        self._framing: Framing | None = None
        self._payload: list[bytes] | None = None
        self._tail = b""

    @property
    def begun(self) -> bool:
        """Whether the client has been sent a part of the reply, whichever worker it came from."""
        return self.first_byte_s is not None

    @property
    def cut_short(self) -> bool:
        """Whether the reply is known to lack its end, though its framing is complete."""
        return False

    def on_head(self, head: ResponseHead, connection: Upstream) -> None:
        """See `Consumer.on_head`."""
        self.head = head
        if head.status in RETRIED_STATUS:
            self.refusal = Collected(MAX_REFUSAL_BYTES)
            self.refusal.on_head(head, connection)
            connection.divert(self.refusal)
            return
        self._connection = connection
        self._framing = connection.framing
        if not self._is_stream():
            self._pace = None
        if self._reply.request.http10 and isinstance(self._framing, ChunkedFraming):
            self._payload = self._framing.payload = []
        self._reply.watch(self)

    def on_body(self, data: bytes) -> None:
        """See `Consumer.on_body`."""
        if self._payload is not None:
            data = b"".join(self._payload)
            self._payload.clear()
        if self._pace is not None:
            self._pace.add(data)
        self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
        if self.first_byte_s is None:
            self._start(data)
        else:
            self._reply.write(data)

    def on_end(self) -> None:
        """See `Consumer.on_end`."""
        if self.first_byte_s is None:
            self._start(b"")
        self._reply.watch(None)

    def on_full(self) -> None:
        """The client does not keep up: stop reading from the worker."""
        if self._connection is not None:
            self._connection.pause(self)

    def on_drained(self) -> None:
        """The client has caught up: read on."""
        if self._connection is not None:
            self._connection.resume(self)

    def fail(self, message: str) -> bool:
        """End a reply whose worker died: with an error event where one can be put, else by cutting the connection.

        Returns:
            Whether the client was told.
        """
        self._reply.watch(None)
        if not self._between_events():
            self._reply.abort()
            return False
        event = b"data: %b\n\ndata: [DONE]\n\n" % error_body(message, "upstream_error", code="worker_lost")
        self._reply.write(event if self._payload is not None else b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        return True

    def _start(self, first: bytes) -> None:
        assert self.head is not None
        self.first_byte_s = self._loop.time()
        head, unchunked = self.head, self._payload is not None
        chunked = CHUNKED if head.chunked and not unchunked else ()
        framed = not unchunked and (head.chunked or head.length is not None)
        self._reply.start(head.status, (*chunked, *self._headers), first, framed=framed, lines=head.lines)

    def served(self) -> Served | None:
        """What a reply that is complete gave; None where it was no stream, or nobody wanted to know."""
        return None if self._pace is None else self._pace.served()

    def _is_stream(self) -> bool:
        assert self.head is not None
        return self.head.status == 200 and self.head.header(b"content-type").startswith(b"text/event-stream")

    def _between_events(self) -> bool:
        whole = self._framing is not None and self._framing.between_chunks
        end = EVENT_END if self._payload is not None else EVENT_END + b"\r\n"
        return self._is_stream() and whole and self._tail.endswith(end)
