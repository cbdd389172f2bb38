"""Relays a stream event by event, so that another worker can go on with it where its own is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coterie.engines.base import Transcript
from coterie.errors import EngineError
from coterie.gateway.edge.http1 import ChunkedFraming, Header, MalformedError, ResponseHead, error_body
from coterie.gateway.edge.reply import Reply
from coterie.gateway.legs.stream import CHUNKED, EVENT_END, Pace, Relay
from coterie.gateway.legs.upstream import Upstream

MAX_EVENT_BYTES = 16 << 20
"""The first event names the prompt's tokens."""

_LAST_CHUNK = b"0\r\n\r\n"


class EventRelay(Relay):
    """A relay that sends whole events only, as the transcript has them, in chunks of its own.

    The workers of one stream have a relay each, all with the same transcript.  A reply that is no stream is relayed
    as it comes.

    Args:
        reply: what the client is sent.
        headers: to be added to the reply's.
        loop: whose clock `first_byte_s` is on.
        pace: is shown the body of a stream; None where nobody wants to know.
        transcript: what of the stream has come.
        begun: whether an earlier worker's bytes were relayed.

    Attributes:
        streams: whether the reply is a stream, as far as is known.
    """

    __slots__ = ("_chunks", "_ended", "_goes_on", "_partial", "_transcript", "streams")

    def __init__(
        self,
        reply: Reply,
        headers: Sequence[Header],
        loop: asyncio.AbstractEventLoop,
        pace: Pace | None,
        transcript: Transcript,
        *,
        begun: bool = False,
    ) -> None:
        super().__init__(reply, headers, loop, pace)
        self._goes_on = begun
        self._transcript = transcript
        self._partial = bytearray()
        self.streams = True
        self._ended = False
        self._chunks = not reply.request.http10

    @property
    def begun(self) -> bool:
        """See `Relay.begun`."""
        return self._goes_on or self.first_byte_s is not None

    @property
    def cut_short(self) -> bool:
        """See `Relay.cut_short`."""
        return self.streams and not self._transcript.closed

    def on_head(self, head: ResponseHead, connection: Upstream) -> None:
        """See `Consumer.on_head`."""
        super().on_head(head, connection)
        if self.refusal is not None:
            return
        self.streams = self._is_stream()
        if self.streams and isinstance(self._framing, ChunkedFraming):
            self._payload = self._framing.payload = []
        elif not self.streams and self.begun:
            raise MalformedError(f"status {head.status} where a stream was to go on")

    def on_body(self, data: bytes) -> None:
        """See `Consumer.on_body`."""
        if not self.streams:
            super().on_body(data)
            return
        payload = self._payload
        if payload is not None:
            data = payload[0] if len(payload) == 1 else b"".join(payload)
            payload.clear()
        if self._pace is not None:
            self._pace.add(data)
        if self._partial or not data.endswith(EVENT_END):
            data = self._whole(data)
        if data:
            self._take(data)

    def on_end(self) -> None:
        """See `Consumer.on_end`."""
        if self.streams:
            self._reply.watch(None)
        else:
            super().on_end()

    def close(self, events: Sequence[bytes]) -> None:
        """End a stream whose output is complete with these events."""
        self._reply.watch(None)
        self._put(events, last=True)

    def fail(self, message: str) -> bool:
        """See `Relay.fail`."""
        if not self.streams:
            return super().fail(message)
        body = error_body(message, "upstream_error", code="worker_lost")
        self.close([b"data: " + body, b"data: [DONE]"])
        return True

    def _whole(self, data: bytes) -> bytes:
        """The events that are whole with these bytes; the rest is kept."""
        partial = self._partial
        known = len(partial)
        partial += data
        end = partial.rfind(EVENT_END, max(known - 1, 0)) + len(EVENT_END)
        if end < len(EVENT_END):
            if len(partial) > MAX_EVENT_BYTES:
                raise MalformedError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
            return b""
        whole = bytes(partial[:end])
        del partial[:end]
        return whole

    def _take(self, data: bytes) -> None:
        """Send what the transcript makes of these events, up to one that it cannot take."""
        transcript, sent = self._transcript, []
        try:
            for event in data[: -len(EVENT_END)].split(EVENT_END):
                if out := transcript.add(event):
                    sent.append(out)
                if transcript.closed:
                    break
        except EngineError as error:
            raise MalformedError(str(error)) from None
        finally:
            if sent:
                self._put(sent, last=transcript.closed)

    def _put(self, events: Sequence[bytes], *, last: bool) -> None:
        if self._ended:
            return
        self._ended = last
        data = EVENT_END.join((*events, b"")) if events else b""
        if self._chunks:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = data + _LAST_CHUNK if last else data
        if self.first_byte_s is None:
            self._start(data)
        else:
            self._reply.write(data)

    def _start(self, first: bytes) -> None:
        if not self.streams:
            super()._start(first)
            return
        self.first_byte_s = self._loop.time()
        if self._goes_on:
            self._reply.write(first)
            return
        assert self.head is not None
        headers = (*(CHUNKED if self._chunks else ()), *self._headers)
        self._reply.start(self.head.status, headers, first, framed=self._chunks, lines=_without_length(self.head))


def _without_length(head: ResponseHead) -> bytes:
    if head.length is None:
        return head.lines
    lines = head.lines.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.lower().startswith(b"content-length:"))
