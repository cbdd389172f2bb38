"""How long a client's connection waits after each reply, and for what; the transport is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stories import post, story

from coterie.gateway.edge.client import ClientConnection, ClientLimits, Clients
from coterie.gateway.edge.reply import Reply
from coterie.gateway.edge.request import Request

LIMITS = ClientLimits(connections=10, body_bytes=1000, held_bytes=10_000, idle_s=1000, request_s=2000, stall_s=3000)


class Wire:
    """A transport: what it sent, and what it is asked to do."""

    def __init__(self) -> None:
        self.sent = b""
        self.reads = True
        self.ended = False
        self.owed = 0

    def write(self, data: bytes) -> None:
        self.sent += data

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.owed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.ended = True


class Server:
    """Answers each request of one connection when it is told to."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.clients = Clients(LIMITS, lambda reason: None)
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.turns: asyncio.Queue[None] = asyncio.Queue()
        self.connection = ClientConnection(self._handle, lambda _: None, self.clients, asyncio.get_running_loop())
        transport: Any = self.wire
        self.connection.connection_made(transport)

    async def _handle(self, request: Request, reply: Reply) -> None:
        await self.turns.get()
        reply.send(200, [], request.body)

    async def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self.turns.put_nowait(None)
        for _ in range(10 * count):
            await asyncio.sleep(0)

    def left_s(self) -> float:
        return self.connection.deadline - asyncio.get_running_loop().time()


@story
async def test_a_client_that_takes_nothing_is_cut_in_time_though_its_next_request_is_under_way() -> None:
    server = Server()
    server.connection.data_received(post(b"a") + post(b"b"))
    server.connection.pause_writing()
    await server.answer()
    assert server.connection.busy
    assert server.left_s() == pytest.approx(LIMITS.stall_s, abs=10)
    server.connection.data_received(post(b"c")[:20])
    assert server.left_s() == pytest.approx(LIMITS.stall_s, abs=10)
    await server.answer()
    assert not server.connection.busy
    assert server.left_s() == pytest.approx(LIMITS.stall_s, abs=10)


@story
@pytest.mark.parametrize(("owed", "left_s"), [(0, 5), (1, LIMITS.stall_s)])
async def test_a_reply_before_a_refused_request_has_time_to_drain(owed: int, left_s: float) -> None:
    server = Server()
    server.connection.data_received(post(b"a") + post(b"x" * 1001))
    server.wire.owed = owed
    await server.answer()
    assert server.wire.ended
    assert b"\r\n\r\naHTTP/1.1 413 " in server.wire.sent
    assert server.left_s() == pytest.approx(left_s, abs=1)
    server.connection.pause_writing()
    server.connection.resume_writing()
    assert server.left_s() == pytest.approx(5, abs=1)


@story
@pytest.mark.parametrize(
    "last", [post(b"b", headers="Connection: close\r\n"), b"garbage\r\n\r\n"], ids=["closing", "refused"]
)
async def test_a_client_that_leaves_after_its_last_reply_is_noticed_however_much_it_had_sent_ahead(last: bytes) -> None:
    server = Server()
    server.connection.data_received(post(b"a") * 70 + last + b"more" * 1000)
    assert not server.wire.reads
    await server.answer(71)
    assert server.wire.ended
    assert server.wire.reads


@story
async def test_bodies_that_are_no_longer_wanted_are_no_longer_counted() -> None:
    server = Server()
    server.connection.data_received(post(b"a" * 10) + post(b"b" * 100) + post(b"c" * 1000))
    assert server.clients.held_bytes == 1110
    server.connection.shut()
    assert server.clients.held_bytes == 10
    await server.answer()
    assert server.clients.held_bytes == 0
    assert server.wire.ended
