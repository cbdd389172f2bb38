"""Workers that break in the middle, and clients that do not keep up."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import Exchange, FakeEngine, die_after, event, half, serve_well, when
from stories import cluster, eventually, story

from coterie.gateway.edge.reply import Reply
from coterie.gateway.legs.upstream import STALE_S

ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
STREAM = {**ASK, "stream": True}


@story
async def test_a_stream_whose_worker_dies_between_events_ends_with_an_error_event() -> None:
    async with cluster() as running:
        running.decode[0].answer = die_after(2)
        reply = await running.post(STREAM)
        events = reply.body.split(b"\n\n")
        assert reply.status == 200
        assert b"t0 " in events[0]
        assert b"t1 " in events[1]
        error = json.loads(events[2].removeprefix(b"data: "))["error"]
        assert error["code"] == "worker_lost"
        assert "decode-0" in error["message"]
        assert events[3:] == [b"data: [DONE]", b""]
        await running.idle()


@story
async def test_the_connection_lives_on_after_an_error_event() -> None:
    async with cluster() as running, running.client() as client:
        running.decode[0].answer = die_after(1)
        client.post(json.dumps(STREAM).encode())
        await client.reply()
        client.post(json.dumps(ASK).encode())
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("cut", [b"5", b"40\r\ndata: {", b"8\r\ndata: {}\r\n"])
@story
async def test_a_stream_cut_within_a_chunk_or_an_event_is_never_ended_as_if_whole(cut: bytes) -> None:
    async with cluster(continue_streams=False) as running, running.client() as client:
        running.decode[0].answer = die_after(2, cut=cut)
        client.post(json.dumps(STREAM).encode())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        await running.idle()


@story
async def test_a_whole_reply_cut_in_the_middle_cuts_the_client_too() -> None:
    async with cluster() as running, running.client() as client:
        running.decode[0].answer = half(200)
        client.post(json.dumps(ASK).encode())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        await running.idle()


@story
async def test_a_worker_that_dies_between_head_and_body_gets_the_client_a_502_where_there_is_no_other() -> None:
    async with cluster(decode=1) as running:
        running.decode[0].answer = die_after(0)
        assert (await running.post(STREAM)).status == 502
        await running.idle()


@story
async def test_a_stream_that_pauses_too_long_is_given_up() -> None:
    async def pause(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        exchange.chunk(event("t0 "))
        await asyncio.Event().wait()

    async with cluster(idle_timeout_s=0.1) as running:
        running.decode[0].answer = pause
        reply = await running.post(STREAM)
        assert b"did not answer for 0.1 s" in reply.body
        await eventually(lambda: running.decode[0].aborted == 1)
        await running.idle()


@story
async def test_a_kept_connection_that_the_worker_has_closed_is_replaced_without_the_client_noticing() -> None:
    async def reset_once(engine: FakeEngine, exchange: Exchange) -> None:
        engine.answer = serve_well
        exchange.reset()

    async with cluster(decode=1) as running:
        decode = running.decode[0]
        assert (await running.post(ASK)).status == 200
        decode.answer = reset_once
        assert (await running.post(ASK)).status == 200
        assert len(decode.seen) == 3
        await running.idle()
        assert running.metric("transport_errors_total", worker="decode-0", kind="closed") == 0


@story
async def test_a_kept_connection_lost_while_the_worker_may_be_at_work_does_not_make_it_work_twice() -> None:
    async def work_then_die(engine: FakeEngine, exchange: Exchange) -> None:
        await asyncio.sleep(2 * STALE_S)
        exchange.reset()

    async with cluster(decode=1) as running:
        decode = running.decode[0]
        assert (await running.post(ASK)).status == 200
        decode.answer = when(lambda seen: seen.json["max_tokens"] > 1, work_then_die)  # its release works
        assert (await running.post({**ASK, "max_tokens": 3})).status == 502
        await running.idle()
        assert [seen.json["max_tokens"] for seen in decode.seen[1:]] == [3, 1]
        assert not running.kv.held


@story
async def test_interim_responses_are_skipped_and_a_body_ended_by_its_connection_is_relayed() -> None:
    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        exchange.write(b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n")
        exchange.head(200, b"content-type: text/plain\r\nconnection: close\r\n")
        exchange.write(b"all there is")
        await exchange.writer.drain()
        exchange.close()

    async with cluster() as running, running.client() as client:
        running.decode[0].answer = answer
        client.post(json.dumps(ASK).encode())
        reply = await client.reply()
        assert (reply.status, reply.body) == (200, b"all there is")
        assert reply.headers["connection"] == "close"
        await running.idle()


@story
async def test_a_client_that_does_not_read_pauses_the_worker_and_the_gateway_holds_no_more_than_its_buffers() -> None:
    size, written = 256 << 10, 0

    async def flood(engine: FakeEngine, exchange: Exchange) -> None:
        nonlocal written
        engine.collect(exchange.seen)
        exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        for _ in range(160):
            exchange.chunk(b"x" * size)
            await exchange.writer.drain()
            written += size
        exchange.write(b"0\r\n\r\n")

    async with cluster(decode=1, continue_streams=False) as running, running.client() as client:
        client.reader._limit = 1024  # the client's own buffer
        running.decode[0].answer = flood
        client.post(json.dumps(STREAM).encode())
        await eventually(lambda: any(connection.full for connection in running.gateway.clients))
        connection = next(iter(running.gateway.clients))
        stopped_at = -1
        while written != stopped_at:
            stopped_at = written
            await asyncio.sleep(0.3)
        assert written < 32 << 20  # of 40 MiB: what is written fills the sockets, the rest waits in the worker
        assert connection._transport.get_write_buffer_size() < 1 << 20
        reply = await client.reply()
        assert len(reply.body) == 160 * size
        await running.idle()


@story
async def test_a_client_that_never_reads_is_given_up_and_its_worker_freed() -> None:
    async def flood(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        exchange.head(200, b"transfer-encoding: chunked\r\n")
        while True:
            exchange.chunk(b"x" * 65536)
            await exchange.writer.drain()

    async with cluster(decode=1, client_stall_timeout_s=0.1) as running, running.client() as client:
        client.reader._limit = 1024
        running.decode[0].answer = flood
        client.post(json.dumps(STREAM).encode())
        await eventually(lambda: running.decode[0].aborted == 1)
        await running.idle()


def test_a_reply_tells_a_late_watcher_that_the_client_is_already_behind() -> None:
    class Behind:
        full = True

    calls = []

    class Watcher:
        def on_full(self) -> None:
            calls.append("full")

        def on_drained(self) -> None:
            calls.append("drained")

    reply = Reply(None, Behind())  # type: ignore[arg-type]
    reply.watch(Watcher())
    reply.notify(full=False)
    assert calls == ["full", "drained"]
