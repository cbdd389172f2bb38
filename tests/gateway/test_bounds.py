"""What clients may take of the gateway: connections, headers, memory, time."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from fake_engine import hang
from stories import RawClient, cluster, eventually, post, story

ASK = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


async def trickle(client: RawClient, data: bytes, pause_s: float) -> None:
    """Send byte by byte."""
    for i in range(len(data)):
        client.send(data[i : i + 1])
        await asyncio.sleep(pause_s)


@story
async def test_a_connection_more_than_may_be_open_is_told_so_and_those_that_are_go_on() -> None:
    async with cluster(max_connections=2) as running, running.client() as first, running.client() as second:
        for client in (first, second):
            client.send(HEALTH)
            assert (await client.reply()).status == 200
        reply = await running.post(ASK)
        assert (reply.status, reply.json["error"]["code"]) == (503, "too_many_connections")
        assert (reply.headers["connection"], reply.headers["retry-after"]) == ("close", "1")
        assert running.metric("refusals_total", reason="too_many_connections") == 1
        second.leave()
        await eventually(lambda: len(running.gateway.clients) == 1)
        assert (await running.post(ASK)).status == 200
        first.send(HEALTH)
        assert (await first.reply()).status == 200


@story
async def test_more_headers_than_are_taken_get_431() -> None:
    async with cluster() as running:
        assert (await running.post(ASK, headers="a: b\r\n" * 198)).status == 200
        reply = await running.post(ASK, headers="a: b\r\n" * 199)  # with host and content-length
        assert (reply.status, reply.json["error"]["message"]) == (431, "there are more than 200 headers")


@story
async def test_all_bodies_together_are_bounded_and_what_ended_makes_room() -> None:
    async with (
        cluster(max_held_bytes=2 * len(ASK) + 10) as running,
        running.client() as first,
        running.client() as second,
    ):
        running.prefill[0].answer = hang
        first.post(ASK)
        second.send(post(ASK)[:-1])  # one that is still coming counts, too
        await eventually(lambda: running.gateway.body_bytes == 2 * len(ASK) - 1)
        for request in (
            post(ASK),
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n20\r\n" + ASK,
        ):
            async with running.client() as third:
                third.send(request)
                reply = await third.reply()
                assert (reply.status, reply.json["error"]["code"]) == (503, "too_many_bytes")
        first.leave()
        second.leave()
        await eventually(lambda: running.gateway.body_bytes == 0)
        await running.idle()


@pytest.mark.parametrize("refused", [b"", b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n"])
@story
async def test_bytes_are_given_back_after_each_request_also_behind_a_refused_one(refused: bytes) -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(ASK) * 3 + refused)
        replies = [(await client.reply()).status for _ in range(1 if refused else 3)]
        assert set(replies) == {200}
        await eventually(lambda: running.gateway.body_bytes == 0)


@pytest.mark.parametrize("part", ["head", "body", "chunks"])
@story
async def test_a_client_that_trickles_its_request_is_cut_off_in_time(part: str) -> None:
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000
    whole = {"head": post(ASK), "body": post(b" " * 1000), "chunks": chunked}[part]
    at_once = 0 if part == "head" else whole.index(b"\r\n\r\n") + 4
    async with cluster(client_request_timeout_s=0.15) as running, running.client() as client:
        client.send(whole[:at_once])
        trickling = asyncio.ensure_future(trickle(client, whole[at_once:], 0.01))
        assert (await client.reply()).status == 408
        trickling.cancel()
        assert not any(engine.seen for engine in running.engines)


@story
async def test_slow_clients_do_not_slow_another() -> None:
    async with cluster(client_request_timeout_s=5) as running, contextlib.AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(running.client()) for _ in range(200)]
        for client in slow:
            client.send(b"POST /v1/completions HTTP/1.1\r\nx: ")
        await eventually(lambda: len(running.gateway.clients) == 200)
        assert (await running.post(ASK)).status == 200


@story
async def test_a_request_that_is_coming_when_the_gateway_stops_is_told_so() -> None:
    async with cluster() as running, running.client() as client:
        client.send(post(ASK)[:-1])
        await eventually(lambda: running.gateway.body_bytes > 0)
        stopping = asyncio.ensure_future(running.gateway.finish(1.0))
        reply = await client.reply()
        assert (reply.status, reply.json["error"]["code"]) == (503, "stopping")
        assert reply.headers["connection"] == "close"
        client.leave()
        await stopping
