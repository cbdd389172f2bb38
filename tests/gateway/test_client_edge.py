"""HTTP at the client's edge: framing, limits, keep-alive, pipelining, versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from itertools import pairwise

import pytest
from fake_engine import Exchange, FakeEngine, hang
from stories import COMPLETIONS, cluster, eventually, post, story

ASK = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3, "stream": True}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@story
async def test_one_connection_serves_many_requests_over_one_connection_to_each_worker() -> None:
    async with cluster(decode=1) as running, running.client() as client:
        before = [engine.connections for engine in running.engines]
        for _ in range(5):
            client.post(ASK)
            assert (await client.reply()).status == 200
        assert [engine.connections for engine in running.engines] == before


@story
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with cluster() as running, running.client() as client:
        client.send(b"".join(post(ASK, headers=f"X-Request-Id: r{i}\r\n") for i in range(200)))
        replies = [await client.reply() for _ in range(200)]
        assert [reply.headers["x-request-id"] for reply in replies] == [f"r{i}" for i in range(200)]
        await running.idle()


@story
async def test_a_chunked_request_is_read() -> None:
    async with cluster() as running, running.client() as client:
        client.send(chunked(ASK[:10], ASK[10:11], ASK[11:]))
        assert (await client.reply()).status == 200
        assert running.decode[0].seen[0].json["prompt"] == "a b c"


@story
async def test_expect_continue_is_answered_before_the_body() -> None:
    async with cluster() as running, running.client() as client:
        head, body = post(ASK, headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert (await client.reply()).status == 100
        client.send(body)
        assert (await client.reply()).status == 200
        assert "expect" not in running.prefill[0].seen[0].headers


@story
async def test_expect_continue_behind_a_request_is_answered_after_its_reply() -> None:
    async with cluster() as running, running.client() as client:
        head, body = post(ASK, headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
        client.send(post(STREAM) + head + b"\r\n\r\n")
        assert (await client.reply()).body.endswith(b"data: [DONE]\n\n")
        assert (await asyncio.wait_for(client.reply(), 5)).status == 100
        client.send(body)
        assert (await client.reply()).status == 200


@story
async def test_an_http_1_0_client_is_not_told_to_continue() -> None:
    async with cluster() as running, running.client() as client:
        head, body = post(ASK, headers="Expect: 100-continue\r\n").replace(b"/1.1", b"/1.0").split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        await asyncio.sleep(0.05)
        client.send(body)
        assert (await client.reply()).status == 200


@story
async def test_white_space_around_a_value_is_no_part_of_it() -> None:
    async with cluster() as running:
        reply = await running.post(ASK, headers="X-Request-Id: \t mine \t\r\n")
        assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")


@pytest.mark.parametrize("body", [ASK, STREAM])
@story
async def test_an_http_1_0_client_gets_a_body_without_chunks_and_a_closed_connection(body: bytes) -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        reply = await client.reply()
        assert "transfer-encoding" not in reply.headers
        assert reply.headers["connection"] == "close"
        assert b"t0 " in reply.body
        if body is STREAM:
            assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
        assert await client.at_end()


@story
async def test_connection_close_is_honoured() -> None:
    async with cluster() as running, running.client() as client:
        client.post(ASK, headers="Connection: close\r\n")
        reply = await client.reply()
        assert reply.headers["connection"] == "close"
        assert await client.at_end()


@story
async def test_an_offer_to_upgrade_is_ignored() -> None:
    async with cluster() as running, running.client() as client:
        client.post(ASK, headers="Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n")
        assert (await client.reply()).status == 200
        client.post(ASK)
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("body", [ASK, STREAM])
@story
async def test_an_offer_to_upgrade_leaves_the_version_as_it_is(body: bytes) -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(body, headers="Connection: Upgrade\r\nUpgrade: h2c\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"))
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in reply.headers


@story
async def test_a_thousand_offers_to_upgrade_in_one_read_are_each_answered() -> None:
    async with cluster() as running, running.client() as client:
        await eventually(lambda: bool(running.gateway.clients))
        offer = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        next(iter(running.gateway.clients)).data_received(offer * 2000)
        for _ in range(2000):
            assert (await client.reply()).status == 200


@pytest.mark.parametrize(
    ("header", "status"), [("transfer-encoding: gzip\r\n", 501), (f"content-length: {1 << 40}\r\n", 413)]
)
@story
async def test_a_request_that_offers_to_upgrade_is_refused_for_what_is_wrong_with_it(header: str, status: int) -> None:
    async with cluster() as running, running.client() as client:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
        client.send(f"{head}{header}\r\n".encode())
        assert (await client.reply()).status == status
        assert await client.at_end()


@pytest.mark.parametrize(
    ("path", "status"), [("/health", b"200"), ("/v1/models", b"200"), (COMPLETIONS, b"405"), ("/nowhere", b"404")]
)
@story
async def test_the_reply_to_head_is_that_to_get_without_its_body(path: str, status: bytes) -> None:
    async with cluster() as running, running.client() as client:
        client.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        assert (await client.reply()).status == 200


@story
async def test_trailers_do_not_become_headers() -> None:
    async with cluster() as running, running.client() as client:
        client.send(chunked(ASK)[:-2] + b"authorization: forged\r\nx-request-id: a b\r\n\r\n")
        assert (await client.reply()).status == 200
        assert not any("authorization" in seen.headers for engine in running.engines for seen in engine.seen)


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"0\r\n", b"1;x="])
@story
async def test_trailers_and_chunk_extensions_over_the_bound_get_431(endless: bytes) -> None:
    async with cluster() as running, running.client() as client:
        client.send(CHUNKED + b"1\r\n{\r\n" + endless)
        await eventually(lambda: bool(running.gateway.clients))
        await asyncio.sleep(0.05)
        client.send((b"y: z\r\n" if endless == b"0\r\n" else b"x") * 70000)
        assert (await client.reply()).status == 431


@story
async def test_a_coding_that_is_not_understood_gets_501() -> None:
    async with cluster() as running, running.client() as client:
        client.send(chunked(ASK).replace(b"transfer-encoding: ", b"transfer-encoding: gzip, "))
        assert (await client.reply()).status == 501
        assert await client.at_end()
        assert not running.prefill[0].seen


@story
async def test_a_body_at_the_bound_is_taken_and_one_byte_more_gets_413() -> None:
    async with cluster(max_body_bytes=len(ASK)) as running:
        assert (await running.post(ASK)).status == 200
        reply = await running.post(ASK + b" ")
        assert reply.status == 413
        assert reply.json["error"]["type"] == "invalid_request_error"
        await running.idle()


@story
async def test_the_bound_is_64_mib_unless_configured() -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(b" " * (64 << 20) + b"x"))
        assert (await client.reply()).status == 413
        await running.idle()


@story
async def test_a_chunked_body_over_the_bound_gets_413_and_a_closed_connection() -> None:
    async with cluster(max_body_bytes=1000) as running, running.client() as client:
        client.send(chunked(b"x" * 600, b"x" * 600))
        reply = await client.reply()
        assert reply.status == 413
        assert await client.at_end()
        assert not running.prefill[0].seen


@story
async def test_headers_over_the_bound_get_431_whole_or_endless() -> None:
    async with cluster() as running:
        assert (await running.post(ASK, headers=f"X-Big: {'x' * 65536}\r\n")).status == 431
        async with running.client() as client:
            client.send(b"GET /health HTTP/1.1\r\nx-big: ")
            await eventually(lambda: bool(running.gateway.clients))
            await asyncio.sleep(0.05)
            client.send(b"x" * 70000)
            assert (await client.reply()).status == 431


@pytest.mark.parametrize(
    "bad",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"POST /v1/completions\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost : x\r\n\r\n",
        CHUNKED + b"zz\r\n",
    ],
)
@story
async def test_what_is_not_http_gets_400_and_a_closed_connection(bad: bytes) -> None:
    async with cluster() as running, running.client() as client:
        client.send(bad)
        assert (await client.reply()).status == 400
        assert await client.at_end()
        assert not any(engine.seen for engine in running.engines)


@story
async def test_garbage_behind_good_requests_is_refused_after_their_replies() -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(ASK) * 3 + b"\x00\x01garbage\r\n\r\n" + post(ASK))
        assert [(await client.reply()).status for _ in range(4)] == [200, 200, 200, 400]
        assert await client.at_end()
        await running.idle()
    assert len(running.decode[0].seen) + len(running.decode[1].seen) == 3


@story
async def test_a_request_that_is_too_large_is_answered_though_the_reply_before_it_is_on_its_way() -> None:
    async with cluster(max_body_bytes=1000) as running, running.client() as client:
        client.send(post(ASK) + post(b"x" * 1001))
        assert [(await client.reply()).status for _ in range(2)] == [200, 413]
        assert await client.at_end()


@story
async def test_a_long_reply_arrives_whole_though_the_client_sends_on_what_is_not_read() -> None:
    long = b'"' + b"x" * 12_000_000 + b'"'  # more than the sockets' buffers hold

    async def whole(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.full(200, long)
        await exchange.writer.drain()

    async def send_on(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"y" * 1000)
                await asyncio.sleep(0.001)

    async with cluster(decode=1, max_body_bytes=1000) as running, running.client() as client:
        running.decode[0].answer = whole
        client.send(post(ASK) + post(b"x" * 1001))
        sending = asyncio.create_task(send_on(client.writer))
        await client.reader.readuntil(b"\r\n\r\n")
        read = bytearray()
        while data := await client.reader.read(1 << 16):
            read += data
            await asyncio.sleep(0.002)
        assert read.startswith(long)
        assert read[len(long) :].startswith(b"HTTP/1.1 413 ")
        sending.cancel()


@story
async def test_a_truncated_request_is_dropped_without_a_trace() -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(ASK)[:-5])
        await eventually(lambda: len(running.gateway.clients) == 1)
        client.writer.write_eof()
        assert await client.at_end()
        await eventually(lambda: not running.gateway.clients)
        assert not any(engine.seen for engine in running.engines)


@story
async def test_a_request_that_does_not_arrive_in_time_gets_408() -> None:
    async with cluster(client_request_timeout_s=0.1) as running, running.client() as client:
        client.send(post(ASK)[:-5])
        assert (await client.reply()).status == 408
        assert await client.at_end()


@story
async def test_an_idle_connection_is_closed() -> None:
    async with cluster(client_idle_timeout_s=0.1) as running, running.client() as client:
        assert await client.at_end()


@story
async def test_any_split_of_a_request_gives_the_same_result() -> None:
    rng = random.Random(7)
    requests = [post(ASK, headers="X-Request-Id: same\r\n"), chunked(ASK[:7], ASK[7:])]
    async with cluster(decode=1) as running, running.client() as client:
        for trial in range(60):
            request = requests[trial % 2]
            cuts = sorted({0, len(request), *(rng.randrange(len(request)) for _ in range(rng.randrange(1, 30)))})
            # Through the protocol itself: a socket would join what is sent in pieces.
            await eventually(lambda: bool(running.gateway.clients))
            connection = next(iter(running.gateway.clients))
            for start, end in pairwise(cuts):
                connection.data_received(request[start:end])
            assert (await client.reply()).status == 200
            assert running.decode[0].seen[-1].json["prompt"] == "a b c"


@story
async def test_much_pipelining_stops_the_reading_until_it_is_worked_off() -> None:
    async with cluster() as running, running.client() as client:
        running.prefill[0].answer = hang
        client.send(post(ASK) * 2000)
        await eventually(lambda: bool(running.prefill[0].seen))
        await asyncio.sleep(0.1)
        connection = next(iter(running.gateway.clients))
        assert 0 < len(connection._waiting) < 2000
        client.leave()
        running.prefill[0].answer = hang
