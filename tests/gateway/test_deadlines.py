"""No wait is without an end: requests as a whole, and workers that fall silent."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import Exchange, FakeEngine, event, hang, when
from stories import cluster, eventually, story

ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
STREAM = {**ASK, "stream": True}


async def drip(engine: FakeEngine, exchange: Exchange) -> None:
    """A stream that never pauses for long, and never ends."""
    engine.collect(exchange.seen)
    exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
    while True:
        exchange.chunk(event("t "))
        await exchange.writer.drain()
        await asyncio.sleep(0.02)


@story
async def test_a_request_that_takes_too_long_ends_with_504_and_frees_its_worker() -> None:
    async with cluster(request_timeout_s=0.3) as running:
        running.prefill[0].answer = hang
        reply = await running.post(ASK)
        assert reply.status == 504
        assert "within 0.3 s" in reply.json["error"]["message"]
        await eventually(lambda: running.prefill[0].aborted == 1)
        await running.idle()
        assert running.metric("requests_total", path="/v1/completions", status="504") == 1
        assert running.metric("client_disconnects_total", window="prefill") == 0


@story
async def test_a_stream_that_takes_too_long_ends_with_an_error_event_and_the_connection_lives_on() -> None:
    async with cluster(request_timeout_s=0.3) as running, running.client() as client:
        running.decode[0].answer = drip
        client.post(json.dumps(STREAM).encode())
        reply = await client.reply()
        assert b"within 0.3 s" in reply.body
        assert reply.body.endswith(b"data: [DONE]\n\n")
        await eventually(lambda: running.decode[0].aborted == 1)
        await running.idle()
        assert not running.kv.held
        client.post(json.dumps(ASK).encode())
        assert (await client.reply()).status == 200


@story
async def test_a_client_that_leaves_as_its_time_is_over_is_not_answered() -> None:
    async with cluster(request_timeout_s=0.3) as running, running.client() as client:
        running.prefill[0].answer = hang
        client.post(json.dumps(ASK).encode())
        await eventually(lambda: bool(running.gateway.dispatcher.running))
        ((journey, task),) = running.gateway.dispatcher.running.items()
        journey.late = True
        task.cancel()
        next(iter(running.gateway.clients)).connection_lost(None)
        await running.idle()
        assert journey.reply.status == 0
        assert running.metric("client_disconnects_total", window="prefill") == 1


@story
async def test_requests_at_a_worker_that_has_fallen_silent_go_on_at_another() -> None:
    async with cluster(health_interval_s=0.05, health_timeout_s=0.1) as running:
        silent = running.decode[0]
        silent.answer, silent.silent = hang, True
        reply = await running.post(ASK)
        assert (reply.status, reply.json["choices"][0]["text"]) == (200, "t0 t1 t2 ")
        assert running.metric("retries_total", role="decode", reason="timeout") == 1
        await running.idle()


@story
async def test_a_worker_whose_health_is_late_but_which_streams_keeps_its_requests() -> None:
    async with cluster(decode=1, health_interval_s=0.05, health_timeout_s=0.1) as running:
        worker = running.decode[0]
        worker.silent, worker.token_delay_s = True, 0.02
        reply = await running.post({**STREAM, "max_tokens": 60})
        assert reply.body.count(b"data: ") == 61
        await running.idle()


@story
async def test_a_worker_joins_although_one_of_the_other_role_hangs() -> None:
    async with cluster(prefill=2, health_interval_s=0.05, health_timeout_s=0.2, breaker_open_s=0.05) as running:
        running.prefill[1].silent = True
        await running.decode[0].stop()
        await eventually(lambda: len(running.gateway.decode.available()) == 1)
        await running.decode[0].start()
        await eventually(lambda: len(running.gateway.decode.available()) == 2)


@story
async def test_a_worker_joins_although_the_only_partner_to_probe_it_with_hangs() -> None:
    async with cluster(health_interval_s=0.05, prefill_timeout_s=0.1, breaker_open_s=0.05) as running:
        running.prefill[0].answer = when(lambda seen: seen.headers["x-request-id"] == "coterie-probe", hang)
        await running.decode[0].stop()
        await eventually(lambda: len(running.gateway.decode.available()) == 1)
        await running.decode[0].start()
        await eventually(lambda: len(running.gateway.decode.available()) == 2)


@story
async def test_a_fault_as_deadlines_are_looked_at_does_not_end_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(request_timeout_s=0.6) as running:
        running.prefill[0].answer = hang
        looks = []

        def fail(now_s: float) -> None:
            looks.append(now_s)
            monkeypatch.undo()
            raise ZeroDivisionError

        monkeypatch.setattr(running.gateway.dispatcher, "expire", fail)
        assert (await running.post(ASK)).status == 504
        assert len(looks) == 1
