"""The client side: one connection, its requests one after another, and the reply to each."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools

from coterie.engines.base import Body
from coterie.engines.large import LARGE_BYTES
from coterie.engines.pieces import Pieces
from coterie.gateway.edge.http1 import (
    MAX_HEAD_BYTES,
    Header,
    RefusedError,
    error_body,
    origin_form,
    response_head,
    retry_after,
)
from coterie.gateway.edge.keys import Key

MAX_HEADERS = 200
MAX_PIPELINED_BYTES = 64 << 10
_LINGERING = 256
"""Connections beyond the bound that are told so; any more are cut."""
PIECE_BYTES = 16 << 10
"""How much is parsed before others get their turn: at most a millisecond's work, if it is chunks of a byte."""

_KEPT_BYTES = 64 << 10

_DRAIN_S = 5.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSING: Header = (b"connection", b"close")


@dataclass(slots=True)
class Request:
    """A client's request; header names in lower case.

    Attributes:
        method: such as "POST".
        target: path and query, as sent.
        path: the target without its query.
        headers: all headers, in order.
        body: the whole body, without framing; in pieces if it is large.
        keep_alive: whether the client expects another request on the connection.
        http10: whether the client speaks HTTP/1.0, which has no chunks.
        arrived_s: when it was complete, on the loop's clock.
        key: the API key that it shows; None where none is asked for.
    """

    method: str = ""
    target: bytes = b""
    path: str = ""
    headers: list[Header] = field(default_factory=list)
    body: Body = b""
    keep_alive: bool = True
    http10: bool = False
    arrived_s: float = 0.0
    key: Key | None = None
    _named: dict[bytes, bytes] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Value of the first header called `name`, which is in lower case; only once all headers are there."""
        if self._named is None:
            self._named = dict(reversed(self.headers))  # so that the first of several counts
        return self._named.get(name)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on what a client may send, and how slowly.

    Attributes:
        connections: how many may be open at once.
        body_bytes: largest request body.
        held_bytes: bytes of all bodies that are here at once.
        request_s: seconds from a request's first byte to its last.
        idle_s: seconds that an idle connection is kept.
        stall_s: seconds for which a client may refuse to take more of its reply.
    """

    connections: int = 10_000
    body_bytes: int = 64 << 20
    held_bytes: int = 1 << 30
    request_s: float = 60.0
    idle_s: float = 75.0
    stall_s: float = 60.0


@dataclass(slots=True)
class Clients:
    """What all client connections of a gateway share.

    Attributes:
        limits: bounds on each and on all; may be replaced.
        on_refused: called with the reason when a request is refused before it is complete.
        connections: those that are open.
        held_bytes: bytes of the bodies that are here: coming, waiting or being answered.
    """

    limits: ClientLimits
    on_refused: Callable[[str], None]
    connections: set[ClientConnection] = field(default_factory=set)
    held_bytes: int = 0


class Watcher(Protocol):
    """Wants to know whether a client keeps up."""

    def on_full(self) -> None:
        """The client does not keep up."""
        ...

    def on_drained(self) -> None:
        """The client has caught up."""
        ...


Handler = Callable[[Request, "Reply"], Coroutine[Any, Any, None]]
Doorman = Callable[[Request], None]
"""Looks at a request's head before its body is read; raises `RefusedError` for one that is not to come in."""


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


class ClientConnection(asyncio.Protocol):
    """One client's connection.

    Reading goes on while a request is in flight, since that is how a client's leaving is noticed; it stops
    when more than `MAX_PIPELINED_BYTES` of further requests have come.

    Attributes:
        deadline: when the present wait for the client is over, on the loop's clock.
        full: whether the client does not keep up with its reply.
    """

    __slots__ = (
        "_body", "_body_size", "_clients", "_closed", "_doorman", "_draining", "_handler", "_head_size", "_held",
        "_in_head", "_loop", "_next", "_owes_continue", "_parser", "_partial", "_piece", "_piece_size", "_reply",
        "_task", "_transport", "_unread", "_waiting", "_waiting_size", "deadline", "full",
    )  # fmt: skip

    def __init__(self, handler: Handler, doorman: Doorman, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline = math.inf
        self.full = False
        self._handler = handler
        self._doorman = doorman
        self._clients = clients
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._reply: Reply | None = None
        self._waiting: deque[Request] = deque()
        self._waiting_size = 0
        self._held = 0  # bytes of bodies that are here
        self._draining = False
        self._closed = False
        self._unread = memoryview(b"")
        self._start_message()

    @property
    def peer(self) -> str:
        """The client's address, without its port."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("peername")[0])

    @property
    def busy(self) -> bool:
        """Whether a request is in flight."""
        return self._task is not None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        clients = self._clients
        clients.connections.add(self)
        self.deadline = self._loop.time() + clients.limits.idle_s
        over = len(clients.connections) - clients.limits.connections
        if over > _LINGERING:
            self.abort()
        elif over > 0:
            self._refuse(_unavailable("too many connections are open", "too_many_connections"))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if len(data) <= PIECE_BYTES:
            self._take(data)
            return
        # The loop would read on for as long as there is more, and nobody else would get a turn.
        assert self._transport is not None
        self._transport.pause_reading()
        self._unread = memoryview(data)
        self._take_next()

    def _take_next(self) -> None:
        """Take the next piece of a long read; others have their turn before the one after it."""
        if self._closed:
            return
        piece, self._unread = self._unread[:PIECE_BYTES], self._unread[PIECE_BYTES:]
        self._take(piece)
        if self._unread:
            self._loop.call_soon(self._take_next)
        else:
            assert self._transport is not None
            self._transport.resume_reading()
            self._limit_pipelining()

    def _take(self, data: bytes | memoryview) -> None:
        if self._draining:
            return
        try:
            self._feed(data)
        except RefusedError as refused:
            self._refuse(refused)
        self._limit_pipelining()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._closed = True
        self._clients.connections.discard(self)
        self._waiting.clear()
        self._hold(0)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.full = True
        self.deadline = self._loop.time() + self._clients.limits.stall_s
        if self._reply is not None:
            self._reply.notify(full=True)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.full = False
        self.deadline = math.inf if self.busy else self._loop.time() + self._clients.limits.idle_s
        if self._reply is not None:
            self._reply.notify(full=False)

    # --- what the reply and the server do ---

    def write(self, data: bytes) -> None:
        """Send bytes to the client, if it is still there."""
        if not self._closed:
            assert self._transport is not None
            self._transport.write(data)

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The deadline has passed."""
        assert self._transport is not None
        if self.busy or self._draining or self._transport.is_closing():
            self.abort()
        elif self._partial:
            self._refuse(RefusedError(408, "the request did not arrive in time"))
        else:
            self._transport.close()

    def shut(self) -> None:
        """Take no further request; close now if none is in flight."""
        self._waiting.clear()
        if self._reply is not None:
            self._reply.request.keep_alive = False
        elif self._partial:
            self._refuse(_unavailable("the gateway is stopping", "stopping"))
        elif self._transport is not None and not self._draining:
            self._transport.close()

    # --- parsing ---

    def _start_message(self, *, partial: bool = False) -> None:
        self._next = Request()
        self._partial = partial
        self._body: list[bytes] = []
        self._body_size = 0
        self._piece: list[bytes] = []
        self._piece_size = 0
        self._head_size = 0
        self._in_head = True
        self._owes_continue = False

    def _feed(self, data: bytes | memoryview) -> None:
        before, body_size, rest = self._next, self._body_size, memoryview(data)
        while rest:
            rest = self._parse(rest)
        if self._next is before:
            # Neither a head, nor a chunk's extension, nor a trailer may be endless.  What began within a read
            # counts from the next read on.
            self._head_size = 0 if self._body_size > body_size else self._head_size + len(data)
            self._check_head_size(self._head_size)

    def _parse(self, data: memoryview) -> memoryview:
        """Parse `data`; return what is left of it after a head that offers to upgrade."""
        try:
            self._parser.feed_data(data)
            return data[:0]
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise RefusedError(400, f"not an HTTP/1.1 request: {error}") from None
        self._decline_upgrade()  # not where the upgrade is handled: it would become the context of what this raises
        return rest

    def _decline_upgrade(self) -> None:
        """Read the head again as if it had not offered another protocol, as RFC 9110, section 7.8, lets a server.

        Some clients offer HTTP/2 with every request; the parser takes what follows for the other protocol.
        """
        request = self._next
        if request.method == "CONNECT":
            raise RefusedError(405, "CONNECT is not served")
        version = b"1.0" if request.http10 else b"1.1"
        lines = [b"%b %b HTTP/%b" % (request.method.encode(), request.target, version)]
        lines += [b"%b: %b" % header for header in request.headers if header[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(memoryview(b"\r\n".join([*lines, b"", b""])))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._start_message(partial=True)
        if not self.busy:
            self.deadline = self._loop.time() + self._clients.limits.request_s

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._next.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too: they are dropped, as RFC 9110, section 6.5.1, asks for."""
        if self._in_head:
            self._next.headers.append((name.lower(), value.rstrip(b" \t")))  # of what is before it, the parser did

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        request = self._next
        request.method = self._parser.get_method().decode("ascii")
        if not request.target.startswith(b"/"):
            request.target = origin_form(request.target)
        request.path = request.target.partition(b"?")[0].decode("latin-1")
        request.http10 = self._check_version()
        if self._parser.should_upgrade():
            return
        self._in_head = False
        self._check_head(request)
        self._doorman(request)
        self._check_body_size(int(request.header(b"content-length") or 0))
        if (request.header(b"expect") or b"").lower() == b"100-continue" and not request.http10:
            self._owes_continue = True
            self._invite()

    def _invite(self) -> None:
        """Let a client that waits for it send its body, once no reply is in the way."""
        if self._owes_continue and not self.busy:
            self._owes_continue = False
            self.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body_size += len(data)
        self._hold(self._held + len(data))
        self._check_body_size(self._body_size)
        self._piece.append(data)
        self._piece_size += len(data)
        if self._piece_size >= _KEPT_BYTES:  # chunks of a byte each are not to take a hundred times their size
            self._end_piece()

    def _end_piece(self) -> None:
        self._body.append(b"".join(self._piece))
        self._piece.clear()
        self._piece_size = 0

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.should_upgrade():
            return
        request = self._next
        self._end_piece()
        request.body = b"".join(self._body) if self._body_size <= LARGE_BYTES else Pieces(self._body)
        request.keep_alive = self._parser.should_keep_alive() and not request.http10
        self._start_message()
        if self.busy:
            self._waiting.append(request)
            self._waiting_size += len(request.body)
        else:
            self._begin(request)

    def _check_version(self) -> bool:
        """Whether the client speaks HTTP/1.0; the parser would take 0.9 and 2.0, too."""
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise RefusedError(400, f"HTTP/{version} is not served; use HTTP/1.1")
        return bool(version == "1.0")

    def _check_head(self, request: Request) -> None:
        headers = request.headers
        if len(headers) > MAX_HEADERS:
            raise RefusedError(431, f"there are more than {MAX_HEADERS} headers")
        self._check_head_size(sum([len(name) + len(value) + 4 for name, value in headers]))
        hosts = [name for name, _ in headers].count(b"host")
        if hosts > 1 or not (hosts or request.http10):  # RFC 9112, section 3.2
            raise RefusedError(400, f"there must be one Host header, and there are {hosts}")
        coding = request.header(b"transfer-encoding")
        if coding is not None and request.http10:  # RFC 9112, section 6.1
            raise RefusedError(400, "HTTP/1.0 has no transfer-encoding; send a content-length")
        if coding is not None and coding.lower() != b"chunked":
            raise RefusedError(501, "this transfer-encoding is not served; send chunked alone")

    def _check_head_size(self, size: int) -> None:
        if size > MAX_HEAD_BYTES:
            raise RefusedError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")

    def _check_body_size(self, size: int) -> None:
        if size > self._clients.limits.body_bytes:
            raise RefusedError(413, f"the body is larger than {self._clients.limits.body_bytes} bytes")
        if self._clients.held_bytes - self._body_size + size > self._clients.limits.held_bytes:
            raise _unavailable("the bodies of all requests together are too large", "too_many_bytes")

    def _hold(self, size: int) -> None:
        """So many bytes of bodies are here now."""
        self._clients.held_bytes += size - self._held
        self._held = size

    def _limit_pipelining(self) -> None:
        if self._waiting and self._waiting_size + len(self._waiting) * 1024 > MAX_PIPELINED_BYTES:
            assert self._transport is not None
            self._transport.pause_reading()

    # --- one request after another ---

    def _begin(self, request: Request) -> None:
        self.deadline = math.inf
        request.arrived_s = self._loop.time()
        self._reply = Reply(request, self)
        self._task = self._loop.create_task(self._handler(request, self._reply))
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        reply, self._reply, self._task = self._reply, None, None
        assert reply is not None
        assert self._transport is not None
        failed = task.cancelled() or task.exception() is not None
        if self._closed:
            return
        self._hold(self._held - len(reply.request.body))
        if failed:
            self.abort()
        elif not reply.request.keep_alive:
            self._transport.close()
            self.deadline = self._loop.time() + self._clients.limits.stall_s  # what is written may still have to drain
        elif self._waiting:
            request = self._waiting.popleft()
            self._waiting_size -= len(request.body)
            self._begin(request)
        else:
            if not self._unread:
                self._transport.resume_reading()
            self._invite()
            limits = self._clients.limits
            self.deadline = self._loop.time() + (limits.request_s if self._partial else limits.idle_s)

    def _refuse(self, refused: RefusedError) -> None:
        """Answer a request that cannot be read on, then let what the client still sends run out.

        Closing at once would reset the connection, and the client would never see why.
        """
        self._clients.on_refused(refused.reason)
        self._draining = True
        self._waiting.clear()
        self._start_message()
        self._hold(len(self._reply.request.body) if self._reply is not None else 0)
        if self.busy:
            self.shut()  # the reply in flight goes first, and is the last
            return
        assert self._transport is not None
        Reply(Request(keep_alive=False), self).refuse(refused)
        if self._transport.can_write_eof():  # with TLS, the client closes first
            self._transport.write_eof()
        self.deadline = self._loop.time() + _DRAIN_S


def _unavailable(message: str, code: str) -> RefusedError:
    return RefusedError(503, message, "unavailable_error", code=code, headers=[retry_after(1)])
