"""A client that leaves, in each window: the worker stops, nothing is held, no KV is stranded."""

from __future__ import annotations

import asyncio
import json

from fake_engine import Exchange, FakeEngine, hang, when
from stories import cluster, eventually, story

from coterie.gateway.legs.upstream import Collected, Patience, Upstream

ASK = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 1000, "stream": True}).encode()


@story
async def test_while_prefill_runs() -> None:
    async with cluster() as running, running.client() as client:
        running.prefill[0].answer = hang
        client.post(ASK)
        await eventually(lambda: bool(running.prefill[0].seen))
        client.leave()
        await eventually(lambda: running.prefill[0].aborted == 1)
        await running.idle()
        assert running.metric("client_disconnects_total", window="prefill") == 1
        assert not any(engine.seen for engine in running.decode)


@story
async def test_between_the_legs_while_the_decode_worker_accepts_no_connection() -> None:
    async with cluster(decode=1) as running, running.client() as client:
        pool = running.gateway.decode.workers["decode-0"].pool
        connecting, connect = asyncio.Event(), pool._connect

        async def never_connect() -> None:
            connecting.set()
            await asyncio.Event().wait()

        pool.close()
        pool._connect = never_connect
        client.post(ASK)
        await connecting.wait()
        pool._connect = connect
        assert running.kv.held
        client.leave()
        await eventually(lambda: not running.kv.held)
        await running.idle()
        assert running.metric("handoffs_released_total", outcome="released") == 1
        assert running.decode[0].seen[0].json["max_tokens"] == 1


@story
async def test_while_decode_is_waited_for() -> None:
    async def collect_and_hang(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        await hang(engine, exchange)

    async with cluster(decode=1) as running, running.client() as client:
        running.decode[0].answer = collect_and_hang
        client.post(ASK)
        await eventually(lambda: bool(running.decode[0].seen))
        client.leave()
        await eventually(lambda: running.decode[0].aborted == 1)
        await running.idle()
        assert running.metric("client_disconnects_total", window="decode") == 1
        assert not running.kv.held
        assert len(running.decode[0].seen) == 1


@story
async def test_in_the_middle_of_a_stream() -> None:
    async with cluster(decode=1) as running, running.client() as client:
        running.decode[0].token_delay_s = 0.005
        client.post(STREAM)
        await client.reader.readuntil(b"t3 ")
        client.leave()
        await eventually(lambda: running.decode[0].aborted == 1)
        await running.idle()
        assert running.metric("client_disconnects_total", window="stream") == 1


@story
async def test_when_the_prefill_reply_comes_in_the_same_turn() -> None:
    """The reply holds a handoff, which must not be lost with the request."""
    async with cluster(decode=1) as running, running.client() as client:
        pool = running.gateway.prefill.workers["prefill-0"].pool
        keep = pool.keep

        def keep_and_leave(connection: Upstream, now_s: float) -> None:
            """The reply is complete and its task has not run yet: now the client's end is noticed."""
            keep(connection, now_s)
            next(iter(running.gateway.clients)).connection_lost(None)

        pool.keep = keep_and_leave
        client.post(ASK)
        await eventually(lambda: running.kv.kept == 2 and not running.kv.held)
        await running.idle()
        assert running.metric("client_disconnects_total", window="prefill") == 1
        assert running.decode[0].seen[0].json["max_tokens"] == 1


@story
async def test_when_the_prefill_reply_is_on_its_way() -> None:
    async def answer_before_hearing(engine: FakeEngine, exchange: Exchange) -> None:
        try:
            await hang(engine, exchange)
        finally:
            exchange.full(200, engine.prefill_reply())

    async with cluster(decode=1) as running, running.client() as client:
        running.prefill[0].answer = answer_before_hearing
        client.post(ASK)
        await eventually(lambda: bool(running.prefill[0].seen))
        client.leave()
        await eventually(lambda: running.kv.kept == 2 and not running.kv.held)
        await running.idle()
        assert running.metric("client_disconnects_total", window="prefill") == 1
        assert running.metric("handoffs_released_total", outcome="released") == 1
        pool = running.gateway.prefill.workers["prefill-0"].pool
        await eventually(lambda: len(pool.connections) == len(pool._idle))  # the one that was given up is closed


@story
async def test_a_late_reply_that_is_an_error_or_nonsense_is_dropped() -> None:
    for status, body in ((500, b"{}"), (200, b"{}"), (200, b"nonsense")):

        async def answer_before_hearing(_: FakeEngine, exchange: Exchange, full: tuple = (status, body)) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                exchange.full(*full)

        async with cluster(decode=1) as running, running.client() as client:
            running.prefill[0].answer = answer_before_hearing
            client.post(ASK)
            await eventually(lambda running=running: bool(running.prefill[0].seen))
            client.leave()
            await running.idle()
            assert running.metric("client_disconnects_total", window="prefill") == 1
            assert not running.decode[0].seen


@story
async def test_a_prefill_worker_that_goes_on_for_nobody_is_cut_off() -> None:
    async def go_on(engine: FakeEngine, exchange: Exchange) -> None:
        try:
            await hang(engine, exchange)
        finally:
            await hang(engine, exchange)

    async with cluster(decode=1) as running, running.client() as client:
        pool = running.gateway.prefill.workers["prefill-0"].pool
        running.prefill[0].answer = go_on
        client.post(ASK)
        await eventually(lambda: bool(running.prefill[0].seen))
        client.leave()
        await running.idle()
        assert len(pool.connections) - len(pool._idle) == 1
        (waiting,) = pool.connections - set(pool._idle)
        waiting.deadline = 0.0
        await eventually(lambda: len(pool.connections) == len(pool._idle))
        assert running.metric("transport_errors_total", worker="prefill-0", kind="timeout") == 0


@story
async def test_a_pipelined_request_of_a_client_that_left_is_never_sent() -> None:
    async with cluster() as running, running.client() as client:
        running.prefill[0].answer = hang
        client.post(ASK)
        client.post(ASK)
        await eventually(lambda: bool(running.prefill[0].seen))
        client.leave()
        await running.idle()
        assert len(running.prefill[0].seen) == 1


@story
async def test_a_release_that_fails_is_counted_and_ends() -> None:
    async with cluster(decode=1, first_byte_timeout_s=0.1) as running:
        running.decode[0].answer = when(lambda seen: True, hang)
        reply = await running.post(json.loads(ASK))
        assert reply.status == 504
        await running.idle()
        assert running.metric("handoffs_released_total", outcome="failed") == 1


@story
async def test_a_request_given_up_while_its_connection_opens_leaves_no_connection_behind() -> None:
    async with cluster(decode=1, health_interval_s=60) as running:
        pool = running.gateway.decode.workers["decode-0"].pool
        for turns in range(60):
            pool.close()
            asking = asyncio.ensure_future(pool.get(b"/health", b"", Collected(1000), Patience(5, 5)))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: len(pool.connections) == len(pool._idle))
