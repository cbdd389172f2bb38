"""Whole events only reach the client, however the worker's bytes come, and wherever they end."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.engines.base import Transcript
from coterie.engines.vllm_nixl import CHAT, COMPLETIONS, VllmNixl
from coterie.gateway.edge.http1 import (
    ChunkedFraming,
    CloseFraming,
    Framing,
    MalformedError,
    parse_response_head,
)
from coterie.gateway.legs.events import MAX_EVENT_BYTES, EventRelay
from vllm_streams import events, read, seen

engine = VllmNixl()
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def unchunk(body: bytes) -> bytes:
    """The data of a complete chunked body."""
    payload: list[bytes] = []
    ChunkedFraming(payload).feed(body)
    return b"".join(payload)


class FakeReply:
    """What a client is sent, in one process."""

    def __init__(self, *, http10: bool = False) -> None:
        self.request = SimpleNamespace(http10=http10)
        self.heads: list[tuple[int, tuple[Any, ...], bool, bytes]] = []
        self.raw = b""

    def watch(self, watcher: object) -> None:
        pass

    def start(self, status: int, headers: Any, first: bytes, *, framed: bool = True, lines: bytes = b"") -> None:
        self.heads.append((status, tuple(headers), framed, lines))
        self.raw += first

    def write(self, data: bytes) -> None:
        assert data
        self.raw += data

    @property
    def body(self) -> bytes:
        return self.raw if self.request.http10 else unchunk(self.raw)

    @property
    def events(self) -> list[bytes]:
        assert not self.body or self.body.endswith(b"\n\n")
        return self.body.split(b"\n\n")[:-1]


def call_of(chat: bool = False, **fields: Any) -> Any:
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [5, 6]}
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 3, **content, **fields}
    return engine.parse(CHAT if chat else COMPLETIONS, json.dumps(body).encode())


def stream_of(call: Any, **more: Any) -> list[bytes]:
    return list(events(read(json.loads(engine.decode_body(call, None)), chat=call.path == CHAT), **more))


def chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def leg(
    reply: FakeReply, transcript: Transcript, framing: Framing, raw: Sequence[bytes], head: bytes = STREAM
) -> EventRelay:
    """Another worker's relay, after these reads."""
    begun = 1.0 if reply.heads else None
    relay = EventRelay(
        reply, [(b"x-request-id", b"1")], asyncio.new_event_loop(), None, transcript, begun=begun is not None
    )  # type: ignore[arg-type]
    coding = b"transfer-encoding: chunked\r\n" if isinstance(framing, ChunkedFraming) else b""
    relay.on_head(parse_response_head(head + coding + b"\r\n"), SimpleNamespace(framing=framing))  # type: ignore[arg-type]
    for data in raw:
        framing.feed(data)
        relay.on_body(data)
    if framing.done:
        relay.on_end()
    return relay


@pytest.fixture(autouse=True)
def _one_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    yield
    loop.close()


def pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
@pytest.mark.parametrize("layout", ["an event a chunk", "cut anywhere", "all in one"])
def test_a_stream_is_the_same_however_its_bytes_come(chat: bool, size: int, layout: str) -> None:
    call = call_of(chat, stream_options={"include_usage": True})
    transcript = engine.transcript(call, 100)
    body = b"".join(event + b"\n\n" for event in stream_of(transcript.call))
    parts = {
        "an event a chunk": [event + b"\n\n" for event in stream_of(transcript.call)],
        "cut anywhere": pieces(body, 11),
        "all in one": [body],
    }[layout]
    reply = FakeReply()
    relay = leg(reply, transcript, ChunkedFraming(), pieces(chunked(parts), size))
    assert reply.events == stream_of(call)
    assert not relay.cut_short
    assert reply.raw.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("http10", [False, True])
def test_a_stream_without_chunks_is_sent_in_chunks_to_those_who_know_them(http10: bool) -> None:
    call = call_of()
    transcript = engine.transcript(call, 100)
    body = b"".join(event + b"\n\n" for event in stream_of(transcript.call))
    reply = FakeReply(http10=http10)
    leg(reply, transcript, CloseFraming(), pieces(body, 50))
    assert reply.events == stream_of(call)
    ((_, headers, framed, _),) = reply.heads
    assert framed != http10
    assert ((b"transfer-encoding", b"chunked") in headers) != http10


def test_the_length_of_a_stream_is_not_that_of_what_the_client_gets() -> None:
    transcript = engine.transcript(call_of(), 100)
    reply = FakeReply()
    leg(reply, transcript, CloseFraming(), [b": hello\n\n"], STREAM + b"content-length: 9\r\nx-other: 1\r\n")
    assert reply.heads[0][3].splitlines() == [b"content-type: text/event-stream", b"x-other: 1"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_breaks_at_any_byte_goes_on_as_if_it_had_not(chat: bool) -> None:
    call = call_of(chat, stream_options={"include_usage": True})
    expected = seen(stream_of(call, id_="a"))
    raw = chunked([event + b"\n\n" for event in stream_of(engine.transcript(call, 100).call, id_="a")])
    for cut in range(len(raw)):
        transcript, reply = engine.transcript(call, 100), FakeReply()
        relay = leg(reply, transcript, ChunkedFraming(), [raw[:cut]])
        if transcript.complete:
            relay.close(transcript.closing())
        else:
            other = {"id_": "b", "created": 2} if reply.heads else {"id_": "a"}  # the first event says whose it is
            rest = stream_of(transcript.resume(), **other)
            leg(reply, transcript, ChunkedFraming(), [chunked([event + b"\n\n" for event in rest])])
        assert seen(reply.events) == expected, cut
        assert reply.raw.endswith(b"0\r\n\r\n")
        assert len(reply.heads) == 1


def test_an_error_comes_between_two_events_wherever_the_stream_broke() -> None:
    call = call_of()
    raw = chunked([event + b"\n\n" for event in stream_of(engine.transcript(call, 100).call)])
    for cut in range(raw.index(b"data: [DONE]")):
        transcript, reply = engine.transcript(call, 100), FakeReply()
        relay = leg(reply, transcript, ChunkedFraming(), [raw[:cut]])
        assert relay.fail("gone")
        *before, error, done = reply.events
        assert before == stream_of(call)[: len(before)]
        assert json.loads(error[6:])["error"]["code"] == "worker_lost"
        assert done == b"data: [DONE]"
        assert reply.raw.endswith(b"0\r\n\r\n")


def test_what_comes_behind_the_end_is_not_sent() -> None:
    transcript = engine.transcript(call_of(), 100)
    made = [event + b"\n\n" for event in stream_of(transcript.call)]
    reply = FakeReply()
    relay = leg(reply, transcript, ChunkedFraming(), [chunked([*made, b"data: {}\n\n", b"x"])])
    assert reply.events == stream_of(call_of())
    relay.close([b"data: x"])
    assert reply.events == stream_of(call_of())


def test_events_before_one_that_cannot_be_taken_are_sent() -> None:
    transcript = engine.transcript(call_of(), 100)
    made = stream_of(transcript.call)[:2]
    reply = FakeReply()
    with pytest.raises(MalformedError, match="error event"):
        leg(
            reply,
            transcript,
            ChunkedFraming(),
            [chunked([b"\n\n".join([*made, b'data: {"error":"EngineCore"}', b""])])],
        )
    assert reply.events == stream_of(call_of())[:2]


def test_an_event_has_a_largest_size() -> None:
    reads = itertools.repeat(b"x" * (1 << 20), 1 + MAX_EVENT_BYTES // (1 << 20))
    with pytest.raises(MalformedError, match="larger than"):
        leg(FakeReply(), engine.transcript(call_of(), 100), CloseFraming(), list(reads))


@pytest.mark.parametrize("head", [b"HTTP/1.1 400 Bad\r\ncontent-type: text/event-stream\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_a_reply_that_is_no_stream_is_relayed_as_it_comes(head: bytes) -> None:
    reply = FakeReply()
    raw = chunked([b'{"error": 1}'])
    relay = leg(reply, engine.transcript(call_of(), 100), ChunkedFraming(), pieces(raw, 5), head)
    assert reply.raw == raw
    assert not relay.cut_short


def test_a_reply_that_is_no_stream_is_no_rest_of_one() -> None:
    call = call_of()
    transcript, reply = engine.transcript(call, 100), FakeReply()
    leg(reply, transcript, ChunkedFraming(), [chunked([stream_of(transcript.call)[0] + b"\n\n"])])
    with pytest.raises(MalformedError, match="status 400"):
        leg(reply, transcript, ChunkedFraming(), [], b"HTTP/1.1 400 Bad\r\n")


def test_a_stream_that_ends_before_its_end_is_cut_short() -> None:
    call = call_of()
    transcript, reply = engine.transcript(call, 100), FakeReply()
    relay = leg(
        reply, transcript, ChunkedFraming(), [chunked([event + b"\n\n" for event in stream_of(transcript.call)[:2]])]
    )
    assert relay.cut_short
    assert not reply.raw.endswith(b"0\r\n\r\n")
