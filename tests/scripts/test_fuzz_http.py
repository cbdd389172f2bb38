"""A short run of the fuzzer, and that it can find something."""

import asyncio
import random

import fuzz_http
import pytest


@pytest.mark.slow
def test_some_hundred_attacks_are_answered_or_refused():
    ends, waits_s = asyncio.run(fuzz_http.fuzz(0, 16, lambda begun: begun < 600))
    assert {"200", "400", "closed"} <= ends.keys()
    assert waits_s


def attack(answer):
    """One attack on a server that answers in its own way."""

    async def connected(reader, writer):
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    async def run():
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await fuzz_http.attack(random.Random(2), port, b"GET / HTTP/1.1\r\n\r\n")
        finally:
            server.close()
            await asyncio.sleep(0.1)  # its side of the connection ends, too

    return asyncio.run(run())


def test_a_connection_that_does_not_end_is_a_finding(monkeypatch):
    async def never(reader, writer):
        await asyncio.sleep(0.25)

    monkeypatch.setattr(fuzz_http, "ANSWERED_S", 0.2)
    with pytest.raises(fuzz_http.Finding, match="neither answered nor closed"):
        attack(never)


def test_an_answer_that_is_no_http_is_a_finding():
    async def babble(reader, writer):
        await reader.read()
        writer.write(b"hello\r\n\r\n")

    with pytest.raises(fuzz_http.Finding, match="no HTTP"):
        attack(babble)


def test_statuses_of_all_replies_are_seen():
    async def twice(reader, writer):
        await reader.read()
        writer.write(b"HTTP/1.1 204 x\r\n\r\nHTTP/1.1 400 x\r\ncontent-length: 0\r\n\r\n")

    assert attack(twice) == [204, 400]
