"""Bounds on what a client sends before the application sees it whole."""

import asyncio
import contextlib

import pytest

from coterie import http_server
from coterie.errors import ConfigError
from coterie.http_server import listen, port_of, reserve, serving_app

ASK = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Echo:
    """Answers with the body, and notes when a client leaves before its end."""

    def __init__(self):
        self.left = asyncio.Event()

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body += message["body"]
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served():
    """The application, and a function that opens a connection to it."""
    app = Echo()
    with listen("127.0.0.1", 0, "port") as listener:
        async with serving_app(app, listener, grace_s=1):
            yield app, lambda: asyncio.open_connection(*listener.getsockname())


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_S", 0.1)


async def exchange(connect, *parts):
    """All that is answered to these parts, up to the connection's end."""
    reader, writer = await connect()
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize("sent", [b"", b"POST / HT", ASK[:-2], ASK, ASK + b"abc"], ids=len)
def test_a_request_that_does_not_end_is_cut_off(hurry, sent):
    async def story():
        async with served() as (app, connect):
            answer = await exchange(connect, sent)
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            if ASK in sent:
                await asyncio.wait_for(app.left.wait(), 5)

    asyncio.run(story())


def test_a_second_request_that_does_not_end_is_cut_off_too(hurry):
    async def story():
        async with served() as (_, connect):
            answer = await exchange(connect, ASK + b"abcd", ASK + b"ab")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"abcdHTTP/1.1 408 Request Timeout\r\n" in answer

    asyncio.run(story())


def test_a_request_in_pieces_is_served_and_its_connection_lives_on_beyond_the_deadline(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_S", 0.5)

    async def story():
        async with served() as (_, connect):
            reader, writer = await connect()
            for silence_s in (0.6, 0.0):  # longer than a request may take
                for part in (ASK[:9], ASK[9:], b"ab", b"cd"):
                    writer.write(part)
                    await asyncio.sleep(0.005)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
                assert await reader.readexactly(4) == b"abcd"
                await asyncio.sleep(silence_s)
            writer.close()

    asyncio.run(story())


def test_a_head_without_end_is_cut_off_by_its_size():
    async def story():
        async with served() as (_, connect):
            line = b"x-filler: " + b"y" * 1000 + b"\r\n"
            answer = await exchange(connect, ASK[:-2], *[line * 40] * 2)
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            assert (await exchange(connect, ASK[:-2] + line * 30 + b"connection: close\r\n\r\nabcd")).endswith(b"abcd")

    asyncio.run(story())


def test_an_address_is_shared_by_those_who_reserve_it_and_with_nobody_else_once_one_listens():
    with reserve("127.0.0.1", 0, "port", alone=True) as first:
        port = port_of(first)
        message = f"cannot listen on 127.0.0.1 port {port}: .*; choose another --port"
        with reserve("127.0.0.1", port, "port") as second:
            second.listen()
            reserve("127.0.0.1", port, "port").close()
            with pytest.raises(ConfigError, match=message):
                listen("127.0.0.1", port, "port")
            with pytest.raises(ConfigError, match=message):
                reserve("127.0.0.1", port, "port", alone=True)
    with listen("127.0.0.1", port, "port"), pytest.raises(ConfigError, match=message):
        reserve("127.0.0.1", port, "port")
