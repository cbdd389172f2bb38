"""The client side: one connection, its requests one after another, and the reply to each."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

from coterie.gateway.edge.http1 import RefusedError, retry_after
from coterie.gateway.edge.reply import Reply
from coterie.gateway.edge.request import Request, RequestReader

MAX_PIPELINED_BYTES = 64 << 10
_LINGERING = 256
"""Connections beyond the bound that are told so; any more are cut."""
PIECE_BYTES = 16 << 10
"""How much is parsed before others get their turn: at most a millisecond's work, if it is chunks of a byte."""

_DRAIN_S = 5.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


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


Handler = Callable[[Request, Reply], Coroutine[Any, Any, None]]
Doorman = Callable[[Request], None]
"""Looks at a request's head before its body is read; raises `RefusedError` for one that is not to come in."""


class ClientConnection(asyncio.Protocol):
    """One client's connection.

    Reading goes on while a request is in flight, since that is how a client's leaving is noticed; it stops
    when more than `MAX_PIPELINED_BYTES` of further requests have come.

    Attributes:
        deadline: when the present wait for the client is over, on the loop's clock.
        full: whether the client does not keep up with its reply.
    """

    __slots__ = (
        "_clients", "_closed", "_doorman", "_draining", "_handler", "_held", "_loop", "_owes_continue", "_reader",
        "_refused", "_reply", "_task", "_transport", "_unread", "_waiting", "_waiting_size", "deadline", "full",
    )  # fmt: skip

    def __init__(self, handler: Handler, doorman: Doorman, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline = math.inf
        self.full = False
        self._handler = handler
        self._doorman = doorman
        self._clients = clients
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(self)
        self._task: asyncio.Task[None] | None = None
        self._reply: Reply | None = None
        self._waiting: deque[Request] = deque()
        self._waiting_size = 0
        self._held = 0  # bytes of bodies that are here
        self._draining = False
        self._refused: RefusedError | None = None  # what is to be answered after all replies in flight
        self._closed = False
        self._unread = memoryview(b"")
        self._owes_continue = False

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
            self._reader.feed(data)
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
        wait_s = _DRAIN_S if self._draining else self._clients.limits.idle_s
        self.deadline = math.inf if self.busy else self._loop.time() + wait_s
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
        elif self._reader.partial:
            self._refuse(RefusedError(408, "the request did not arrive in time"))
        else:
            self._transport.close()

    def shut(self) -> None:
        """Take no further request; close now if none is in flight."""
        self._waiting.clear()
        self._hold(self._held - self._waiting_size)
        self._waiting_size = 0
        if self._reply is not None:
            self._reply.request.keep_alive = False
        elif self._reader.partial:
            self._refuse(_unavailable("the gateway is stopping", "stopping"))
        elif self._transport is not None and not self._draining:
            self._transport.close()

    # --- `Taker` ---

    def on_begin(self) -> None:
        """See `Taker.on_begin`."""
        self._owes_continue = False
        if not (self.busy or self.full):
            self.deadline = self._loop.time() + self._clients.limits.request_s

    def on_head(self, request: Request, body_bytes: int) -> None:
        """See `Taker.on_head`."""
        self._doorman(request)
        self._check_room(body_bytes, body_bytes)
        if (request.header(b"expect") or b"").lower() == b"100-continue" and not request.http10:
            self._owes_continue = True
            self._invite()

    def on_more(self, count: int, size: int) -> None:
        """See `Taker.on_more`."""
        self._hold(self._held + count)
        self._check_room(size, 0)

    def on_request(self, request: Request) -> None:
        """See `Taker.on_request`."""
        self._owes_continue = False
        if self.busy:
            self._waiting.append(request)
            self._waiting_size += len(request.body)
        else:
            self._begin(request)

    def _invite(self) -> None:
        """Let a client that waits for it send its body, once no reply is in the way."""
        if self._owes_continue and not self.busy:
            self._owes_continue = False
            self.write(_CONTINUE)

    def _check_room(self, size: int, to_come: int) -> None:
        """Refuse a body of a size of which so many bytes are not here yet."""
        limits = self._clients.limits
        if size > limits.body_bytes:
            raise RefusedError(413, f"the body is larger than {limits.body_bytes} bytes")
        if self._clients.held_bytes + to_come > limits.held_bytes:
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
        if not self.full:  # of the reply before it, the client has still to take some
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
            self._read_on()
            if self._draining and self._transport.can_write_eof():
                self._transport.write_eof()  # a reset, for what the client still sends, would cost it the reply's end
            else:
                self._transport.close()
            self.deadline = self._loop.time() + self._clients.limits.stall_s  # what is written may still have to drain
        elif self._waiting:
            request = self._waiting.popleft()
            self._waiting_size -= len(request.body)
            self._begin(request)
        else:
            self._await_request()

    def _await_request(self) -> None:
        """No reply is in flight any more."""
        self._read_on()
        if self._refused is not None:
            self._answer_refused(self._refused)
            return
        self._invite()
        if not self.full:
            limits = self._clients.limits
            self.deadline = self._loop.time() + (limits.request_s if self._reader.partial else limits.idle_s)

    def _read_on(self) -> None:
        """Read again, if requests that waited had stopped it; a client that leaves is not noticed otherwise."""
        assert self._transport is not None
        if not self._unread:
            self._transport.resume_reading()

    def _refuse(self, refused: RefusedError) -> None:
        """Read no further; answer what came before, and then the request that cannot be read on."""
        self._clients.on_refused(refused.reason)
        self._draining = True
        self._reader.reset()
        self._owes_continue = False
        self._hold(self._waiting_size + (len(self._reply.request.body) if self._reply is not None else 0))
        if self.busy:
            self._refused = refused
        else:
            self._answer_refused(refused)

    def _answer_refused(self, refused: RefusedError) -> None:
        """Say why no more is read, then let what the client still sends run out.

        Closing at once would reset the connection, and the client would never see why.
        """
        assert self._transport is not None
        owed = self._transport.get_write_buffer_size()  # of a reply before it
        Reply(Request(keep_alive=False), self).refuse(refused)
        if self._transport.can_write_eof():  # with TLS, the client closes first
            self._transport.write_eof()
        self.deadline = self._loop.time() + (self._clients.limits.stall_s if owed else _DRAIN_S)


def _unavailable(message: str, code: str) -> RefusedError:
    return RefusedError(503, message, "unavailable_error", code=code, headers=[retry_after(1)])
