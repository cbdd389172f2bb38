"""Decode workers are passed over by what they say of themselves."""

from __future__ import annotations

import asyncio

import pytest
from stories import cluster, eventually, story

from coterie.core import Reading
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig

ASK = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
QUICK = {"reading_interval_s": 0.02}


def metrics(kv_usage: float, waiting: int) -> bytes:
    """As vLLM 0.32 shows them; the deferred ones wait for their KV."""
    return (
        f'# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv_usage}\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting + 3}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} {waiting}\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 3.0\n'
    ).encode()


def readings(running) -> list[Reading | None]:
    return [state.reading for state in running.gateway.decode.ledger.states()]


@story
async def test_a_full_decode_worker_is_passed_over_until_it_has_room() -> None:
    async with cluster(kv_limit=0.9, **QUICK) as running:
        for engine, usage in zip(running.decode, (0.95, 0.2), strict=True):
            engine.metrics = metrics(usage, 4)
        await eventually(lambda: readings(running) == [Reading(0.95, 4), Reading(0.2, 4)])
        for _ in range(4):
            assert (await running.post(ASK)).status == 200
        entries = running.gateway.dispatcher.decisions.entries()
        assert [entry["decode"] for entry in entries] == ["decode-1"] * 4
        assert entries[0]["passed_over"] == {"decode-0": "KV cache is full"}
        assert running.metric("passed_over_total", worker="decode-0", reason="KV cache is full") == 4
        assert running.metric("worker_kv_usage", role="decode", worker="decode-0") == 0.95
        running.decode[0].metrics = metrics(0.3, 4)
        await eventually(lambda: readings(running)[0] == Reading(0.3, 4))
        await running.post(ASK)
        assert running.gateway.dispatcher.decisions.entries()[-1]["decode"] == "decode-0"


@story
async def test_a_decode_worker_where_requests_wait_is_passed_over() -> None:
    async with cluster(pass_over_queues=True, **QUICK) as running:
        for engine, waiting in zip(running.decode, (1, 0), strict=True):
            engine.metrics = metrics(0.95, waiting)
        await eventually(lambda: readings(running) == [Reading(0.95, 1), Reading(0.95, 0)])
        await running.post(ASK)
        await running.post(ASK)
        entries = running.gateway.dispatcher.decisions.entries()
        assert [entry["decode"] for entry in entries] == ["decode-1"] * 2
        assert entries[0]["passed_over"] == {"decode-0": "requests wait"}


@story
async def test_a_worker_that_falls_silent_is_no_longer_passed_over() -> None:
    async with cluster(kv_limit=0.9, **QUICK) as running:
        for engine, usage in zip(running.decode, (0.95, 0.2), strict=True):
            engine.metrics = metrics(usage, 0)
        await eventually(lambda: readings(running) == [Reading(0.95, 0), Reading(0.2, 0)])
        running.decode[0].metrics = b"nothing of use\n"
        await eventually(lambda: readings(running)[0] is None)
        assert running.metric("reading_failures_total", worker="decode-0") > 0
        await running.post(ASK)
        assert running.gateway.dispatcher.decisions.entries()[-1]["decode"] == "decode-0"


@story
async def test_without_filters_workers_are_not_asked() -> None:
    async with cluster() as running:
        for engine in running.decode:
            engine.metrics = metrics(0.99, 0)
        await asyncio.sleep(0.05)
        assert readings(running) == [None, None]


@pytest.mark.parametrize("limit", [0.0, 1.5, -1.0])
def test_a_kv_limit_that_cannot_be_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="kv_limit"):
        GatewayConfig(prefill=("http://a:1",), decode=("http://b:1",), kv_limit=limit)
