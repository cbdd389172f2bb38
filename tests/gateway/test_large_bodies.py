"""Bodies of many megabytes: they arrive whole, steer nothing, and hold nobody up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import Exchange, FakeEngine, hang, when
from stories import Cluster, cluster, eventually, story

from coterie.engines.large import LARGE_BYTES

LONG = "word " * (1 << 18)  # 1.25 MiB
PROMPTS: list[Any] = [LONG, [7, 123456] * (1 << 16), [LONG], '\\"\u00e9\U0001f600' * (1 << 16)]


def ask(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 3, **fields}


def sent(running: Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    (prefill,), decodes = running.prefill[0].seen, [seen for engine in running.decode for seen in engine.seen]
    return prefill.json, decodes[0].json


@pytest.mark.parametrize("prompt", PROMPTS, ids=["string", "ids", "list", "escapes"])
@story
async def test_a_large_prompt_reaches_both_workers_as_it_is(prompt: Any) -> None:
    async with cluster() as running:
        assert (await running.post(ask(prompt, stop=[LONG]))).status == 200
        prefill, decode = sent(running)
        assert prefill["prompt"] == decode["prompt"] == prompt
        assert decode["stop"] == [LONG]
        assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 3)
        assert decode["kv_transfer_params"]["do_remote_prefill"]
        await running.idle()
        assert not running.kv.held


@story
async def test_steering_fields_are_taken_out_of_large_bodies_however_they_are_written() -> None:
    steering = {"remote_host": "evil", "pad": LONG}
    body = json.dumps(
        ask(LONG, kv_transfer_params=steering, bootstrap_room=1, vllm_xargs={"kv_transfer_params": steering, "a": LONG})
    )
    written = body.replace('"bootstrap_room"', '"\\u0062ootstrap_room"').replace('"kv_tr', '"\\u006bv_tr').encode()
    async with cluster() as running:
        assert (await running.post(written)).status == 200
        for seen in sent(running):
            assert "bootstrap_room" not in seen
            assert seen["vllm_xargs"] == {"a": LONG}
            assert "evil" not in json.dumps(seen["kv_transfer_params"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "tiny", "prompt": "%b" 1}' % LONG.encode(), 400),
        (b'{"model": "tiny", "prompt": ["%b"}' % LONG.encode(), 400),
        (b'["%b"]' % LONG.encode(), 400),
        (b'{"model": 1, "prompt": "%b"}' % LONG.encode(), 400),
        (b'{"model": "tiny", "prompt": "%b", "vllm_xargs": [1]}' % LONG.encode(), 400),
    ],
)
@story
async def test_a_large_body_that_a_small_one_would_be_refused_for_is_refused(body: bytes, status: int) -> None:
    async with cluster() as running:
        reply = await running.post(body)
        assert reply.status == status
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert not running.prefill[0].seen
        await running.idle()


@pytest.mark.parametrize("prompts", [["a", LONG], [[1, 2] * 100_000, [3]]])
@story
async def test_several_prompts_of_which_one_is_large_are_not_split(prompts: list[Any]) -> None:
    async with cluster() as running:
        assert (await running.post(ask(prompts))).status == 200
        assert not running.prefill[0].seen
        assert running.metric("not_split_total", reason="several prompts in one request") == 1


@story
async def test_a_large_chunked_body_of_tiny_chunks_is_read() -> None:
    body = json.dumps(ask("x" * 300_000)).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[i : i + 7] for i in range(0, len(body), 7)))
    async with cluster() as running, running.client() as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        client.send(head + chunks + b"0\r\n\r\n")
        client.post(json.dumps(ask("next")).encode())
        assert [(await client.reply()).status for _ in range(2)] == [200, 200]
        assert len(running.prefill[0].seen[0].json["prompt"]) == 300_000


async def reply_with_many_blocks(engine: FakeEngine, exchange: Exchange) -> None:
    reply = json.loads(engine.prefill_reply())
    reply["kv_transfer_params"]["remote_block_ids"] = [list(range(200_000))]
    exchange.full(200, json.dumps(reply).encode())


@story
async def test_a_handoff_of_many_blocks_is_handed_on_whole() -> None:
    async with cluster() as running:
        running.prefill[0].answer = when(lambda seen: seen.is_prefill, reply_with_many_blocks)
        assert (await running.post(ask("short"))).status == 200
        _, decode = sent(running)
        assert decode["kv_transfer_params"]["remote_block_ids"] == [list(range(200_000))]
        await running.idle()
        assert not running.kv.held


@story
async def test_a_large_reply_that_is_no_json_is_the_workers_fault() -> None:
    async def nonsense(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.full(200, b"[" * (LARGE_BYTES + 1))

    async with cluster() as running:
        running.prefill[0].answer = when(lambda seen: seen.is_prefill, nonsense)
        assert (await running.post(ask("short"))).status == 502
        await running.idle()


@story
async def test_a_client_that_leaves_while_its_large_body_is_sent_on_leaves_nothing_behind() -> None:
    async with cluster() as running:
        running.prefill[0].answer = when(lambda seen: seen.is_prefill, hang)
        async with running.client() as client:
            client.post(json.dumps(ask(LONG * 8)).encode())
            await asyncio.sleep(0.05)
            client.leave()
        await eventually(lambda: not running.gateway.clients)
        await running.idle()
