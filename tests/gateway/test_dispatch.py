"""One request's life, seen from both ends."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from fake_engine import JSON, garbage, hang, refuse, reset, serve_well, when
from stories import COMPLETIONS, cluster, eventually, story

from coterie.core import ExpertCounts, ModelGeometry
from traces import tiny_moe_trace

CHAT = "/v1/chat/completions"
ASK = {"model": "tiny", "prompt": "a b c", "max_tokens": 3}


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "labelled.trace"
    tiny_moe_trace().save(path)
    return str(path)


def counts() -> ExpertCounts:
    """7 tokens that all chose expert 1 in both layers."""
    geometry = ModelGeometry(layers=2, experts=4, top_k=1)
    return ExpertCounts(geometry, np.array([[0, 7, 0, 0]] * 2, np.uint8), 7, 7)


@story
async def test_the_prefill_worker_gets_one_token_and_the_decode_worker_the_client_s_own_request() -> None:
    async with cluster(counts=counts()) as running:
        body = b'{"model": "tiny", "prompt":  "x", "max_tokens":3, "top_p": 0.50, "new_field": {"a" : [1e3, null]}}'
        reply = await running.post(body)
        assert reply.status == 200
        assert reply.json["choices"][0]["text"] == "t0 t1 t2 "
        prefill, decode = running.prefill[0].seen[0], running.decode[0].seen[0]
        assert prefill.json == {
            **json.loads(body),
            "max_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        assert decode.json == {
            **json.loads(body),
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_request_id": "kv-3",
                "remote_block_ids": [[1, 2]],
            },
        }
        assert b'"top_p":0.50,"new_field":{"a" : [1e3, null]}' in decode.body
        await running.idle()
        assert not running.kv.held


@story
async def test_a_stream_is_relayed_byte_for_byte() -> None:
    async with cluster(continue_streams=False) as running:
        running.decode[0].token_delay_s = running.decode[1].token_delay_s = 0.005
        body = json.dumps({**ASK, "stream": True, "max_tokens": 20}).encode()
        relayed = await running.post(body)
        running.url = running.decode[1].url  # the same request, straight to a worker
        direct = await running.post(body)
        assert relayed.raw == direct.raw
        assert relayed.headers["content-type"] == direct.headers["content-type"]
        await running.idle()


@story
async def test_both_legs_and_the_client_share_one_request_id_and_the_credentials_pass() -> None:
    async with cluster() as running:
        headers = (
            "X-Request-Id: mine-1\r\nAuthorization: Bearer k\r\ntraceparent: 00-a-b-01\r\nAccept-Encoding: gzip\r\n"
        )
        headers += "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n"
        reply = await running.post(ASK, CHAT, headers)
        assert reply.headers["x-request-id"] == "mine-1"
        for seen in (running.prefill[0].seen[0], running.decode[0].seen[0]):
            assert seen.target == CHAT
            assert seen.headers["x-request-id"] == "mine-1"
            assert seen.headers["authorization"] == "Bearer k"
            assert seen.headers["traceparent"] == "00-a-b-01"
            assert not {"connection", "x-hop", "keep-alive", "accept-encoding"} & seen.headers.keys()


@story
async def test_a_request_without_an_id_gets_one() -> None:
    async with cluster() as running:
        first, second = await running.post(ASK), await running.post(ASK)
        assert len(first.headers["x-request-id"]) == 32
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("bad", ["x" * 129, "a b", ""])
@story
async def test_an_unusable_request_id_is_refused(bad: str) -> None:
    async with cluster() as running:
        reply = await running.post(ASK, headers=f"X-Request-Id: {bad}\r\n")
        assert reply.status == 400
        assert reply.json["error"]["param"] == "X-Request-Id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b'{"prompt": "x", "stream": "yes"}', "stream"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": -1}', "max_tokens"),
        (b'{"prompt": "x", "model": 3}', "model"),
    ],
)
@story
async def test_a_malformed_body_gets_400_in_the_shape_of_openai_and_reaches_no_worker(body: bytes, param: str) -> None:
    async with cluster() as running:
        reply = await running.post(body)
        assert reply.status == 400
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert reply.json["error"]["param"] == param
        assert not any(engine.seen for engine in running.engines)


@pytest.mark.parametrize("prompt", [b'"\xff"', b"[1e400]", b"[1%b]" % (b"0" * 5000)])
@story
async def test_a_prompt_that_the_domain_policy_cannot_read_gets_400(prompt: bytes, trace_file: str) -> None:
    async with cluster(decode_policy="domain", trace=trace_file) as running:
        reply = await running.post(b'{"model": "tiny", "prompt": %b}' % prompt)
        assert reply.status == 400
        assert "prompt" in reply.json["error"]["message"]
        assert not any(engine.seen for engine in running.engines)


@story
async def test_an_error_of_either_worker_passes_through() -> None:
    async with cluster() as running:
        running.prefill[0].answer = refuse(404, b'{"error": "no such model"}', JSON + b"x-why: p\r\n")
        reply = await running.post(ASK)
        assert (reply.status, reply.body, reply.headers["x-why"]) == (404, b'{"error": "no such model"}', "p")
        running.prefill[0].answer = serve_well
        running.decode[0].answer = running.decode[1].answer = refuse(422, b"<p>no</p>", b"content-type: text/html\r\n")
        reply = await running.post(ASK)
        assert (reply.status, reply.body, reply.headers["content-type"]) == (422, b"<p>no</p>", "text/html")
        await running.idle()


@pytest.mark.parametrize("status", [400, 422, 500])
@story
async def test_a_handoff_that_a_decode_worker_failed_or_refused_to_take_is_released_by_another(status: int) -> None:
    async with cluster() as running:
        running.decode[0].answer = refuse(status, b"{}")
        reply = await running.post(ASK)
        assert reply.status == status
        await running.idle()
        assert not running.kv.held
        released = running.decode[1].seen[0].json
        assert released["max_tokens"] == 1
        assert released["kv_transfer_params"]["remote_request_id"] == "kv-3"
        assert running.metric("handoffs_released_total", outcome="released") == 1


@pytest.mark.parametrize("fault", [reset, garbage])
@story
async def test_a_worker_that_cannot_be_talked_to_is_named_in_a_502_but_not_its_address(fault: object) -> None:
    async with cluster() as running:
        running.prefill[0].answer = fault
        reply = await running.post(ASK)
        assert reply.status == 502
        assert "prefill worker prefill-0" in reply.json["error"]["message"]
        running.prefill[0].answer = serve_well
        for engine in running.decode:
            engine.answer = fault
        reply = await running.post(ASK)
        assert reply.status == 502
        assert "decode worker decode-" in reply.json["error"]["message"]
        assert b"127.0.0.1" not in reply.body
        await running.idle()


@story
async def test_a_worker_that_hangs_ends_in_504() -> None:
    async with cluster(decode=1, prefill_timeout_s=0.1, first_byte_timeout_s=0.1) as running:
        # its release works
        running.decode[0].answer = when(lambda seen: seen.json["max_tokens"] > 1, hang)
        reply = await running.post(ASK)
        assert reply.status == 504
        assert "decode-0" in reply.json["error"]["message"]
        running.prefill[0].answer = hang
        reply = await running.post(ASK)
        assert reply.status == 504
        assert "prefill-0" in reply.json["error"]["message"]
        await running.idle()
        await eventually(lambda: running.decode[0].aborted == running.prefill[0].aborted == 1)
        assert not running.kv.held


@story
async def test_no_available_worker_is_a_503_before_anything_is_sent() -> None:
    async with cluster() as running:
        for worker in running.gateway.decode.workers.values():
            running.gateway.decode.set_problem(worker, "unhealthy", "down")
        reply = await running.post(ASK)
        assert reply.status == 503
        assert not running.prefill[0].seen
        assert (await running.get("/health")).status == 503
        for worker in running.gateway.decode.workers.values():
            running.gateway.decode.set_problem(worker, "unhealthy", None)
        assert (await running.get("/health")).status == 200


@story
async def test_other_paths_and_methods_are_refused_and_models_relayed() -> None:
    async with cluster() as running:
        assert (await running.get("/v1/models")).json["data"] == [{"id": "tiny"}]
        assert (await running.get("/nowhere")).status == 404
        refused = await running.get(COMPLETIONS)
        assert (refused.status, refused.headers["allow"]) == (405, "POST")
        assert (await running.post({}, "/health")).status == 405


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt_logprobs": 1}, {"echo": True}])
@story
async def test_a_request_that_one_handoff_cannot_stand_for_is_decoded_without_prefill(
    fields: dict[str, object],
) -> None:
    async with cluster() as running:
        reply = await running.post({**ASK, **fields})
        assert reply.status == 200
        assert not running.prefill[0].seen
        assert running.decode[0].seen[0].json == {**ASK, **fields}
        await running.idle()


@story
async def test_prompts_and_limits_count_as_load_while_a_request_runs() -> None:
    async with cluster(default_output_tokens=50) as running:
        running.decode[0].answer = running.decode[1].answer = hang
        asking = [asyncio.ensure_future(running.post(body)) for body in (ASK, {"prompt": "x"})]
        await eventually(lambda: len(running.decode[0].seen) + len(running.decode[1].seen) == 2)
        # 7 prompt tokens each by the worker's count; 3 asked for by one, 50 expected of the other
        assert sorted(state.tokens for state in running.gateway.decode.ledger.states()) == [10, 57]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await running.idle()


@story
async def test_two_hundred_streams_at_once_leave_nothing_behind() -> None:
    async with cluster(prefill=2, decode=3, decode_policy="least_load") as running:
        for engine in running.decode:
            engine.token_delay_s = 0.002
        replies = await asyncio.gather(*(running.post({**ASK, "stream": True, "max_tokens": 16}) for _ in range(200)))
        assert all(reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)
        await running.idle()
        assert not running.kv.held
        assert sum(len(engine.seen) for engine in running.decode) == 200
        # the shortest queue keeps three workers within one request of each other
        loads = sorted(len(engine.seen) for engine in running.decode)
        assert loads[-1] - loads[0] <= 20
