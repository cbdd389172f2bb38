"""KV between the legs: its age is bounded and shown, and what nobody will decode is released the cheapest way."""

from __future__ import annotations

import asyncio
import json

from fake_engine import Exchange, FakeEngine, hang, refuse, reset, when
from stories import Cluster, cluster, eventually, story

ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}
STREAM = {**ASK, "stream": True}


def own(seen: object) -> bool:
    return seen.json["max_tokens"] > 1  # type: ignore[attr-defined]  # not a release


async def strand(running: Cluster) -> list[dict[str, object]]:
    """Have decode-0 refuse a request; return what was sent to decode-1 to release its KV."""
    running.decode[0].answer = when(own, refuse(400, b"{}"))
    assert (await running.post(ASK)).status == 400
    await running.idle()
    return [seen.json for seen in running.decode[1].seen]


@story
async def test_kv_is_released_by_a_request_that_is_refused_and_does_not_carry_the_prompt() -> None:
    async with cluster() as running:
        (release,) = await strand(running)
        assert release["model"] not in running.decode[1].models
        assert release["prompt"] == "x"
        assert not running.kv.held
        assert running.metric("handoffs_released_total", outcome="released") == 1


@story
async def test_kv_of_a_pair_that_is_not_connected_is_released_by_collecting_it() -> None:
    async with cluster() as running:
        running.decode[1].frees_what_it_refuses = False
        running.gateway.decode.workers["decode-1"].met.clear()
        running.gateway.decode.workers["decode-0"].met.clear()
        (release,) = await strand(running)
        assert (release["model"], release["prompt"], release["max_tokens"]) == ("tiny", "a b c", 1)
        assert not running.kv.held


@story
async def test_a_worker_that_is_connected_is_preferred() -> None:
    async with cluster(decode=3) as running:
        running.gateway.decode.workers["decode-1"].met.clear()
        assert await strand(running) == []
        assert len(running.decode[2].seen) == 1
        assert not running.kv.held


@story
async def test_where_a_release_is_not_refused_the_kv_is_collected() -> None:
    async with cluster() as running:
        running.decode[1].answer = when(lambda seen: b"releases" in seen.body, refuse(503, b"{}"))
        first, second = await strand(running)
        assert (first["prompt"], second["prompt"]) == ("x", "a b c")
        assert not running.kv.held


@story
async def test_a_worker_that_comes_back_is_connected_anew() -> None:
    async with cluster(health_interval_s=0.05, breaker_open_s=0.05) as running:
        worker = running.gateway.decode.workers["decode-0"]
        assert worker.met == {"prefill-0"}
        await running.decode[0].stop()
        await eventually(lambda: len(running.gateway.decode.available()) == 1)
        worker.met.add("prefill-9")
        await running.decode[0].start()
        await eventually(lambda: len(running.gateway.decode.available()) == 2)
        assert worker.met == {"prefill-0"}
        assert running.gateway.prefill.workers["prefill-0"].met == {"decode-0", "decode-1"}


@story
async def test_how_many_handoffs_wait_and_how_long_is_shown() -> None:
    async def take_time(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        await asyncio.sleep(0.2)
        await reset(engine, exchange)

    async with cluster(decode=1) as running:
        running.decode[0].answer = when(own, take_time)
        asking = asyncio.ensure_future(running.post(STREAM))
        await eventually(lambda: running.metric("handoffs_waiting") == 1)
        await asyncio.sleep(0.05)
        assert 0.05 <= running.metric("handoff_oldest_seconds") < 2
        assert running.gateway.dispatcher.handoffs.kept_by("prefill-0")
        await asking
        await running.idle()
        assert (running.metric("handoffs_waiting"), running.metric("handoff_oldest_seconds")) == (0, 0)
        assert running.metric("handoff_seconds_count") == 0
        running.decode[0].answer = when(lambda seen: False, hang)
        assert (await running.post(STREAM)).status == 200
        await running.idle()
        assert running.metric("handoff_seconds_count") == 1


@story
async def test_a_prefill_worker_is_needed_until_its_last_kv_was_taken() -> None:
    async with cluster(decode=1) as running:
        fleet = running.gateway.prefill
        worker = fleet.workers["prefill-0"]
        running.decode[0].token_delay_s = 0.05
        async with running.client() as client:
            client.post(json.dumps({**STREAM, "max_tokens": 8}).encode())
            await eventually(lambda: bool(running.decode[0].seen))
            fleet.drain(worker)
            assert fleet.holds_nothing(worker)
            assert running.gateway.dispatcher.handoffs.kept_by("prefill-0")
            await client.reader.readuntil(b"t0 ")
            assert not running.gateway.dispatcher.handoffs.kept_by("prefill-0")
        await running.idle()
