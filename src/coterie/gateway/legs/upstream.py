"""The worker side: a keep-alive connection with one request at a time on it, and who takes the reply."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from coterie.engines.base import Body
from coterie.engines.large import LARGE_BYTES
from coterie.engines.pieces import Pieces
from coterie.errors import EngineError
from coterie.gateway.edge.http1 import (
    MAX_HEAD_BYTES,
    ChunkedFraming,
    Framing,
    MalformedError,
    ResponseHead,
    framing_of,
    parse_response_head,
)

if TYPE_CHECKING:
    from coterie.gateway.legs.pool import Pool

STALE_S = 0.25
"""A worker that was closing a connection is heard of within a trip to it and back; later, it may be at work."""

JOINED_BYTES = 64 << 10
"""Heads and bodies are joined and written by one system call; larger ones are not copied for it."""

PIECE_BYTES = 128 << 10
"""How much of a large body is written before others get their turn."""

LATE_S = 2.0
"""A worker that is told of a client's leaving closes the connection; so long may what it had sent before take."""

Kind = Literal["connect", "closed", "timeout", "garbage"]


class UpstreamError(EngineError):
    """A worker could not be talked to.

    Attributes:
        kind: what happened, as a metric's label.
        stale: whether a kept connection was lost as the request was sent (within `STALE_S`): the worker was closing
            it, and has not begun the request.
    """

    def __init__(self, message: str, kind: Kind, *, stale: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.stale = stale


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a reply.

    Attributes:
        first_byte_s: seconds until its first byte.
        idle_s: seconds between two reads after that.
    """

    first_byte_s: float
    idle_s: float


class Consumer(Protocol):
    """Takes one reply as it arrives.

    Attributes:
        sent: set once the request's bytes went to a worker.
        wanted_late: whether a reply that is on its way is wanted even if the request is cancelled.
    """

    sent: bool
    wanted_late: bool

    def on_head(self, head: ResponseHead, connection: Upstream) -> None:
        """The reply's head is complete."""
        ...

    def on_body(self, data: bytes) -> None:
        """The next bytes of the body, framing included."""
        ...

    def on_end(self) -> None:
        """The reply is complete."""
        ...


class Collected:
    """Keeps a reply in memory, up to a bound.

    Attributes:
        head: the reply's head; None until it arrived.
        sent: whether the request went out.
        complete: whether the whole reply is here.
        wanted_late: see `Consumer`.
        on_complete: called once the whole reply is here; None for nothing.
    """

    __slots__ = ("_limit", "_parts", "_size", "_unchunked", "complete", "head", "on_complete", "sent", "wanted_late")

    def __init__(self, limit_bytes: int, *, wanted_late: bool = False) -> None:
        self.head: ResponseHead | None = None
        self.sent = False
        self.complete = False
        self.wanted_late = wanted_late
        self.on_complete: Callable[[], None] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._limit = limit_bytes
        self._unchunked = False

    def on_head(self, head: ResponseHead, connection: Upstream) -> None:
        """See `Consumer.on_head`."""
        self.head = head
        if isinstance(connection.framing, ChunkedFraming):
            connection.framing.payload = self._parts
            self._unchunked = True

    def on_body(self, data: bytes) -> None:
        """See `Consumer.on_body`."""
        self._size += len(data)
        if self._size > self._limit:
            raise MalformedError(f"the reply is larger than {self._limit} bytes")
        if not self._unchunked:
            self._parts.append(data)

    def on_end(self) -> None:
        """See `Consumer.on_end`."""
        self.complete = True
        if self.on_complete is not None:
            self.on_complete()

    @property
    def status(self) -> int:
        """The reply's status."""
        assert self.head is not None
        return self.head.status

    def body(self) -> bytes:
        """The complete body, without framing."""
        return b"".join(self._parts)

    @property
    def is_large(self) -> bool:
        """Whether the body is too large to be read at once."""
        return self._size > LARGE_BYTES

    def large_body(self) -> Body:
        """The complete body, without framing; in pieces if it is large."""
        return Pieces(self._parts) if self.is_large else self.body()


class Upstream(asyncio.Protocol):
    """One connection to a worker.

    Attributes:
        deadline: when the present wait is over, on the loop's clock.
        framing: of the reply under way; None before its head.
    """

    __slots__ = (
        "_consumer", "_drained", "_future", "_head", "_keep_alive", "_loop", "_patience", "_paused", "_pool",
        "_reused", "_sent_s", "_transport", "_whole", "deadline", "framing",
    )  # fmt: skip

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.deadline = math.inf
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._future: asyncio.Future[None] | None = None
        self._consumer: Consumer | None = None
        self.framing: Framing | None = None
        self._patience = Patience(math.inf, math.inf)
        self._head = b""
        self._keep_alive = False
        self._paused = False
        self._reused = False
        self._sent_s = 0.0
        self._whole = True  # whether all of the request is written
        self._drained: asyncio.Future[None] | None = None

    async def exchange(self, head: bytes, body: Body, consumer: Consumer, patience: Patience) -> None:
        """Send one request; return when its reply is complete.  Cancelling closes the connection.

        If the reply is wanted late, only this side's half is closed at first: the worker hears of it as it does of
        a closed connection, but what it had sent before still arrives.

        Raises:
            UpstreamError: the reply did not arrive whole.
        """
        assert self._transport is not None
        future = self._future = self._loop.create_future()
        self._consumer, self._patience = consumer, patience
        self._sent_s = self._loop.time()
        self.deadline = self._sent_s + patience.first_byte_s
        try:
            if isinstance(body, bytes):
                self._write(head, body)
            else:
                await self._write_in_pieces(head, body, future)
            consumer.sent = self._whole
            await future
        except asyncio.CancelledError:
            # The reply may have completed in the same turn, and the connection be another request's by now.
            if self._future is future:
                self._give_up(consumer)
            raise

    def divert(self, consumer: Consumer) -> None:
        """Give the body of the reply to another consumer than asked for it; only from `Consumer.on_head`."""
        self._consumer = consumer

    def pause(self, consumer: Consumer) -> None:
        """Stop reading: the client does not keep up.  Its own deadline counts meanwhile, not the worker's."""
        if self._consumer is consumer and not self._paused and self._transport is not None:
            self._paused = True
            self.deadline = math.inf
            self._transport.pause_reading()

    def resume(self, consumer: Consumer) -> None:
        """Read on."""
        if self._consumer is consumer and self._paused:
            self.deadline = self._loop.time() + self._patience.idle_s
            self._read_on()

    def expire(self) -> None:
        """The deadline has passed: give up the request, or close the idle connection."""
        waited_s = self._patience.idle_s if self.framing else self._patience.first_byte_s
        self._fail(f"did not answer for {waited_s:g} s", "timeout")

    def cut(self, why: str) -> None:
        """Give up the request."""
        self._fail(why, "timeout")

    def close(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._future is None:
            self.close()  # bytes that nobody asked for
            return
        now_s = self._pool.heard_s = self._loop.time()
        self.deadline = now_s + self._patience.idle_s
        try:
            self._read(data)
        except MalformedError as error:
            self._fail(f"answered what cannot be relayed: {error}", "garbage")
        if len(data) > JOINED_BYTES and not self._paused and self._transport is not None:
            # The loop would read on for as long as there is more, and nobody else would get a turn.
            self._transport.pause_reading()
            self._loop.call_soon(self._read_more)

    def _read_more(self) -> None:
        if not self._paused and self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._pool.forget(self)
        self.resume_writing()  # whoever waits to write on sees that there is no more to do
        if self._future is None:
            return
        if exc is None and self.framing is not None and self.framing.ends_with_connection:
            self._end()
            return
        soon = self._loop.time() < self._sent_s + STALE_S
        stale = self._reused and soon and self.framing is None and not self._head
        where = "in the middle of its reply" if self.framing else "before it answered"
        self._fail(f"closed the connection {where}", "closed", stale=stale)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def _write(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def _write_in_pieces(self, head: bytes, body: Pieces, future: asyncio.Future[None]) -> None:
        """Write until all is written, or the worker has answered or left before that."""
        assert self._transport is not None
        self._whole = False
        self._transport.write(head)
        for start in range(0, len(body), PIECE_BYTES):
            self._transport.writelines(body.span(start, start + PIECE_BYTES))
            await asyncio.sleep(0)
            if self._drained is not None:
                await self._drained
            if future.done():
                return
        self._whole = True

    def _give_up(self, consumer: Consumer) -> None:
        assert self._transport is not None
        if consumer.wanted_late and self._whole:
            self._patience = Patience(LATE_S, LATE_S)
            self.deadline = self._loop.time() + LATE_S
            if self._transport.can_write_eof():  # TLS knows no half: the worker hears of it when the time is over
                self._transport.write_eof()
        else:
            self._leave()
            self._transport.abort()

    # --- reading a reply ---

    def _read(self, data: bytes) -> None:
        if self.framing is None:
            self._head += data
            data = self._read_head()
            if self.framing is None:
                return
        assert self._consumer is not None
        used = self.framing.feed(data)
        if used:
            self._consumer.on_body(data if used == len(data) else data[:used])
        if self.framing.done:
            self._finish(clean=used == len(data))

    def _read_head(self) -> bytes:
        """Read the final response's head from `_head`; return the bytes after it."""
        while (end := self._head.find(b"\r\n\r\n") + 4) >= 4:
            head = parse_response_head(self._head[:end])
            rest = self._head[end:]
            if head.status >= 200:
                self._head = b""
                self._keep_alive = head.keep_alive
                self.framing = framing_of(head)
                assert self._consumer is not None
                self._consumer.on_head(head, self)
                return rest
            self._head = rest  # an interim response, such as 100
        if len(self._head) > MAX_HEAD_BYTES:
            raise MalformedError(f"its headers are larger than {MAX_HEAD_BYTES} bytes")
        return b""

    def _finish(self, *, clean: bool) -> None:
        assert self._future is not None
        late = self._future.cancelled()
        self._read_on()
        self._end()
        if clean and self._keep_alive and self._whole and not late:
            self._pool.keep(self, self._loop.time())
        else:
            self.close()

    def _read_on(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def _end(self) -> None:
        assert self._consumer is not None
        self._consumer.on_end()
        self._leave()

    def _fail(self, what: str, kind: Kind, *, stale: bool = False) -> None:
        error = UpstreamError(f"{self._pool.title} {what}", kind, stale=stale)
        self._leave(error)
        if self._transport is not None:
            self._transport.abort()

    def _leave(self, error: UpstreamError | None = None) -> None:
        """Part with the present request."""
        future, self._future = self._future, None
        self._consumer, self.framing, self._head = None, None, b""
        self._reused = True
        self.deadline = math.inf
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
