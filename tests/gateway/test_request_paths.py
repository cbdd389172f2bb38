"""Which workers a request needs, and what is counted where that is not one of each role."""

from __future__ import annotations

import json

import pytest
from fake_engine import Answer, Exchange, FakeEngine, refuse, when
from stories import COMPLETIONS, cluster, story

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}


def first_token_ends(choice: dict[str, object], *, keep: bool = True) -> Answer:
    """A prefill server whose first token ends the output; as vLLM with NIXL, it keeps the KV all the same."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        reply = json.loads(engine.prefill_reply())
        if not keep:
            engine.kv.held.discard(reply["kv_transfer_params"]["remote_request_id"])
            reply["kv_transfer_params"] = None
        reply |= {"choices": [{"index": 0, **choice, "finish_reason": "stop"}], "created": 1, "model": "tiny"}
        exchange.full(200, json.dumps(reply).encode())

    return when(lambda seen: seen.is_prefill, answer)


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"echo": True}, {"stream": True}])
@story
async def test_a_request_for_one_token_is_the_prefill_worker_s_as_the_client_sent_it(extra: dict[str, object]) -> None:
    async with cluster(split_above_bytes=1000) as running:
        body = {**ASK, "max_tokens": 1, **extra}
        reply = await running.post(body)
        assert reply.status == 200
        assert b"t0 " in reply.body
        assert b"t1 " not in reply.body
        assert [seen.json for seen in running.prefill[0].seen] == [body]
        assert not any(engine.seen for engine in running.decode)
        assert not running.kv.held
        assert running.metric("answered_by_prefill_total", reason="one token") == 1
        assert running.metric("not_split_total", reason="short prompt") == 0
        await running.idle()


@story
async def test_a_request_for_one_token_needs_no_decode_worker() -> None:
    async with cluster() as running:
        for worker in running.gateway.decode.workers.values():
            running.gateway.decode.set_problem(worker, "unhealthy", "down")
        assert (await running.post({**ASK, "max_tokens": 1})).status == 200
        assert (await running.post(ASK)).status == 503


@pytest.mark.parametrize("keep", [True, False])
@story
async def test_an_output_that_ends_with_its_first_token_is_answered_from_the_prefill_reply(keep: bool) -> None:
    async with cluster() as running:
        running.prefill[0].answer = first_token_ends({"text": "end"}, keep=keep)
        reply = await running.post(ASK)
        assert reply.status == 200
        assert reply.json["choices"][0]["text"] == "end"
        assert reply.json["kv_transfer_params"] is None
        assert len(reply.headers["x-request-id"]) == 32
        await running.idle()
        assert not running.kv.held
        released = [engine.seen[0].json for engine in running.decode if engine.seen]
        assert [body["max_tokens"] for body in released] == [1] * keep  # what frees KV that nobody will decode
        assert running.metric("handoffs_released_total", outcome="released") == keep
        assert running.metric("answered_by_prefill_total", reason="ended") == 1
        assert running.metric("decisions_total", role="decode", worker="decode-0", reason="round robin") == 0


@story
async def test_it_is_a_stream_where_one_was_asked_for_and_the_connection_lives_on() -> None:
    async with cluster() as running:
        running.prefill[0].answer = first_token_ends({"message": {"role": "assistant", "content": "end"}})
        async with running.client() as client:
            for _ in range(2):
                client.post(json.dumps({**ASK, "stream": True}).encode(), CHAT)
                reply = await client.reply()
                assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
                assert b'"delta":{"content":"end"}' in reply.body
                assert reply.body.endswith(b"data: [DONE]\n\n")
        await running.idle()
        assert not running.kv.held


@story
async def test_options_of_such_a_stream_that_cannot_be_read_strand_no_kv() -> None:
    async with cluster() as running:
        running.prefill[0].answer = first_token_ends({"text": "end"})
        reply = await running.post({**ASK, "stream": True, "stream_options": 3})
        assert (reply.status, reply.json["error"]["param"]) == (400, "stream_options")
        await running.idle()
        assert not running.kv.held


@story
async def test_a_prefill_worker_that_hands_nothing_over_costs_the_client_nothing_and_is_counted() -> None:
    async with cluster() as running:
        running.prefill[0].answer = when(lambda seen: seen.is_prefill, refuse(200, b'{"kv_transfer_params": null}'))
        reply = await running.post(ASK)
        assert reply.json["choices"][0]["text"] == "t0 t1 t2 "
        assert running.decode[0].seen[0].json == ASK
        assert running.metric("not_split_total", reason="no handoff") == 1
        await running.idle()


@story
async def test_a_prefill_reply_that_cannot_be_read_is_a_502() -> None:
    async with cluster() as running:
        running.prefill[0].answer = when(lambda seen: seen.is_prefill, refuse(200, b"<html>"))
        reply = await running.post(ASK)
        assert reply.status == 502
        assert "prefill worker prefill-0: the prefill reply cannot be read" in reply.json["error"]["message"]
        await running.idle()


@story
async def test_short_prompts_go_to_a_decode_worker_alone_where_the_operator_says_so() -> None:
    async with cluster(split_above_bytes=5, decode_policy="round_robin") as running:
        for prompt, split in (("abc", False), ("abcd", True)):  # 5 and 6 bytes of JSON
            running.forget_probes()
            assert (await running.post({**ASK, "prompt": prompt})).status == 200
            assert bool(running.prefill[0].seen) is split
        assert running.metric("not_split_total", reason="short prompt") == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@story
async def test_paths_that_cannot_be_split_are_a_decode_worker_s_with_unknown_fields_but_no_steering(path: str) -> None:
    async with cluster() as running:
        body = {"model": "tiny", "input": "x", "tools": [{"a": None}], "kv_transfer_params": {"do_remote_prefill": 1}}
        assert (await running.post(body, path)).status == 200
        seen = running.decode[0].seen[0]
        assert (seen.target, seen.json) == (path, {"model": "tiny", "input": "x", "tools": [{"a": None}]})
        assert not running.prefill[0].seen
        assert running.metric("not_split_total", reason="path") == 1


@story
async def test_token_ids_are_disaggregated_too() -> None:
    async with cluster() as running:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}, "new": {"a": 1}}
        assert (await running.post(body, GENERATE)).status == 200
        prefill, decode = running.prefill[0].seen[0], running.decode[0].seen[0]
        assert (prefill.target, decode.target) == (GENERATE, GENERATE)
        assert prefill.json["sampling_params"] == {"max_tokens": 1, "n": 1}
        params = decode.json.pop("kv_transfer_params")
        assert params["do_remote_prefill"] is True
        assert decode.json == {**body, "kv_transfer_params": params}
        await running.idle()
        assert not running.kv.held


@story
async def test_experts_of_each_token_are_refused_before_any_worker_is_asked() -> None:
    async with cluster() as running:
        reply = await running.post({**ASK, "routed_experts_prompt_start": 0})
        assert reply.status == 400
        assert reply.json["error"]["param"] == "routed_experts_prompt_start"
        assert not any(engine.seen for engine in running.engines)


@story
async def test_the_log_says_why_a_request_was_not_split(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="coterie.requests"):
        async with cluster() as running:
            await running.post({**ASK, "echo": True}, COMPLETIONS)
            await running.post(ASK, COMPLETIONS)
    lines = [json.loads(line) for record in caplog.records for line in record.getMessage().splitlines()]
    assert [line["not_split"] for line in lines if "not_split" in line] == ["echo", None]
