"""A stream whose decode worker is lost goes on at another, through real sockets, as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import Answer, Exchange, FakeEngine, half, hang, refuse, serve_well
from stories import Cluster, Reply, cluster, eventually, story

from coterie.engines.vllm_nixl import CHAT, COMPLETIONS
from coterie.gateway.legs.retry import Budget
from vllm_streams import Asked, Seen, events, read, seen, steps

ASK = {"model": "tiny", "prompt": [5, 6], "stream": True, "temperature": 0, "max_tokens": 6}
USAGE = {"stream_options": {"include_usage": True}}
CHAT_ASK = {**ASK, "prompt": None, "messages": [{"role": "user", "content": "hi"}]}


def stream(exchange: Exchange) -> bytes:
    """All bytes of a decode server's answer, its head left out."""
    chat = exchange.seen.target == CHAT
    made = events(read(exchange.seen.json, chat=chat), id_=f"id-{exchange.seen.json['max_tokens']}")
    parts = [event + b"\n\n" for event in made]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def ends(after: int | None, end: Answer | None = None) -> Answer:
    """Send so many bytes of a stream, then do something else: by default, reset the connection."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        if exchange.seen.is_prefill:
            await serve_well(engine, exchange)
            return
        engine.collect(exchange.seen)
        exchange.head(200, b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n")
        exchange.write(stream(exchange)[:after])
        await exchange.writer.drain()
        if after is not None:
            await asyncio.sleep(0.002)
            await (end(engine, exchange) if end else _reset(engine, exchange))

    return answer


async def _reset(engine: FakeEngine, exchange: Exchange) -> None:
    exchange.reset()


def unbroken(ask: dict[str, Any]) -> Seen:
    body = {name: value for name, value in ask.items() if value is not None}
    return seen(list(events(read(body, chat="messages" in body), id_=f"id-{ask['max_tokens']}")))


def shown(reply: Reply) -> Seen:
    assert reply.status == 200
    assert reply.body.endswith(b"\n\n")
    return seen(reply.body.split(b"\n\n")[:-1])


async def lose_first(running: Cluster, after: int, ask: dict[str, Any], end: Answer | None = None) -> Reply:
    """Have the first decode worker that is asked end after so many bytes, and the others be well."""
    left = [after]

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        well = ends(None)
        await (ends(left.pop(), end) if left and not exchange.seen.is_prefill else well)(engine, exchange)

    for engine in running.engines:
        engine.answer = answer
    body = {name: value for name, value in ask.items() if value is not None}
    return await running.post(body, CHAT if "messages" in body else COMPLETIONS)


def error_of(reply: Reply) -> dict[str, Any]:
    *_, error, done, empty = reply.body.split(b"\n\n")
    assert (done, empty) == (b"data: [DONE]", b"")
    found: dict[str, Any] = json.loads(error.removeprefix(b"data: "))["error"]
    return found


def event_bytes(ask: dict[str, Any], count: int, *, followed: bool = True) -> int:
    """Bytes of the first events of a stream, framing included; one that the gateway follows has token ids."""
    body = {name: value for name, value in ask.items() if value is not None}
    if followed:
        body["return_token_ids"] = True
    made = list(events(read(body, chat="messages" in body), id_=f"id-{ask['max_tokens']}"))[:count]
    return sum(len(b"%x\r\n%b\r\n" % (len(event) + 2, event + b"\n\n")) for event in made)


@pytest.mark.parametrize("ask", [{**ASK, **USAGE}, {**CHAT_ASK, **USAGE}, {**ASK, "return_token_ids": True}])
@story
async def test_a_stream_that_breaks_anywhere_ends_as_if_it_had_not(ask: dict[str, Any]) -> None:
    async with cluster(decode=3, retries=9) as running:
        expected, size = unbroken(ask), event_bytes(ask, 99)
        for cut in range(1, size, 61):
            reply = await lose_first(running, cut, ask)
            assert shown(reply) == expected, cut
            running.gateway.dispatcher._budget = Budget()  # so many losses are more than it allows
            for worker in running.gateway.workers:
                worker.breaker.succeeded()
        await running.idle()
        assert not running.kv.held


@pytest.mark.parametrize(
    "end",
    [
        refuse(200, b"garbage that is no chunk"),
        serve_well,
    ],
)
@story
async def test_garbage_within_a_stream_is_a_loss(end: Answer) -> None:
    async with cluster() as running:
        reply = await lose_first(running, event_bytes(ASK, 3), ASK, end)
        assert shown(reply) == unbroken(ASK)
        assert running.metric("continuations_total", outcome="resumed") == 1


@story
async def test_a_worker_that_falls_silent_within_a_stream_is_lost() -> None:
    async with cluster(idle_timeout_s=0.1) as running:
        assert shown(await lose_first(running, event_bytes(ASK, 3), ASK, hang)) == unbroken(ASK)


@story
async def test_a_stream_that_ends_well_but_too_early_goes_on() -> None:
    async def end(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.write(b"0\r\n\r\n")

    async with cluster() as running:
        assert shown(await lose_first(running, event_bytes(ASK, 3), ASK, end)) == unbroken(ASK)
        assert running.metric("transport_errors_total", worker="decode-0", kind="closed") == 1


@story
async def test_an_error_event_of_the_worker_is_a_loss() -> None:
    async def end(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.chunk(b'data: {"error":{"message":"EngineCore died","code":500}}\n\n')
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.write(b"0\r\n\r\n")

    async with cluster() as running:
        assert shown(await lose_first(running, event_bytes(ASK, 3), ASK, end)) == unbroken(ASK)


@story
async def test_the_rest_is_computed_elsewhere_from_the_tokens_that_were_sent() -> None:
    async with cluster(prefill=2) as running:
        reply = await lose_first(running, event_bytes(ASK, 3), ASK)
        assert shown(reply) == unbroken(ASK)
        lost, other = running.decode
        sent = [step.token for step in list(steps(Asked([5, 6], 6)))[:3]]
        assert len(lost.seen) == len(other.seen) == 1
        assert other.seen[0].json["prompt"] == [5, 6, *sent]
        assert other.seen[0].json["kv_transfer_params"]["do_remote_prefill"] is True
        prefills = [made.json for engine in running.prefill for made in engine.seen]
        assert [body["prompt"] for body in prefills] == [[5, 6], [5, 6, *sent]]
        assert running.metric("continuations_total", outcome="resumed") == 1
        assert running.metric("handoff_seconds_sum") >= 0
        assert 0 <= running.metric("ttft_seconds_sum") <= running.metric("request_seconds_sum")
        await running.idle()
        assert not running.kv.held


@story
async def test_a_request_that_is_not_split_goes_on_without_a_prefill_worker() -> None:
    async with cluster(split_above_bytes=1000) as running:
        assert shown(await lose_first(running, event_bytes(ASK, 3), ASK)) == unbroken(ASK)
        assert not running.prefill[0].seen


@story
async def test_where_only_the_end_is_missing_no_worker_is_asked_for_it() -> None:
    ask = {**ASK, **USAGE}
    async with cluster() as running:
        reply = await lose_first(running, event_bytes(ask, 6), ask)
        assert shown(reply) == unbroken(ask)
        assert running.metric("continuations_total", outcome="closed") == 1
        assert not running.decode[1].seen


def lost_each_time(after: int) -> Answer:
    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        await (ends(None) if exchange.seen.is_prefill else ends(after))(engine, exchange)

    return answer


@story
async def test_a_stream_goes_on_only_so_often() -> None:
    ask = {**ASK, "max_tokens": 40}
    async with cluster(decode=6, continuations=2) as running:
        for engine in running.decode:
            engine.answer = lost_each_time(event_bytes(ask, 2))
        reply = await running.post(ask)
        assert error_of(reply)["code"] == "worker_lost"
        assert error_of(reply)["message"].endswith("the stream does not go on: it has gone on 2 times already")
        assert sum(len(engine.seen) for engine in running.decode) == 3
        assert running.metric("continuations_total", outcome="resumed") == 2
        assert running.metric("continuations_total", outcome="refused") == 1
        await running.idle()


@story
async def test_a_stream_goes_on_at_a_third_worker_when_the_second_fails_at_once() -> None:
    async with cluster(decode=3) as running:
        others = iter([ends(event_bytes(ASK, 3)), refuse(503, b"{}"), ends(None)])

        async def answer(engine: FakeEngine, exchange: Exchange) -> None:
            released = exchange.seen.json["max_tokens"] == 1
            await (serve_well if released else next(others))(engine, exchange)

        for engine in running.decode:
            engine.answer = answer
        assert shown(await running.post(ASK)) == unbroken(ASK)
        await running.idle()
        assert not running.kv.held
        assert running.metric("handoffs_released_total", outcome="released") == 1  # that of the second


@pytest.mark.parametrize("answer", [refuse(400, b"{}"), refuse(200, b"nonsense"), refuse(502, b"{}")])
@story
async def test_a_prefill_worker_that_fails_a_continuation_is_passed_over(answer: Answer) -> None:
    async with cluster(prefill=3) as running:
        asked = []

        async def prefill(engine: FakeEngine, exchange: Exchange) -> None:
            asked.append(exchange.seen)
            await (answer if len(asked) == 2 else serve_well)(engine, exchange)

        reply_of_loss = ends(event_bytes(ASK, 3))
        for engine in running.prefill:
            engine.answer = prefill
        running.decode[0].answer, running.decode[1].answer = reply_of_loss, ends(None)
        assert shown(await running.post(ASK)) == unbroken(ASK)
        assert len(asked) == 3


@story
async def test_without_another_worker_the_error_says_so() -> None:
    async with cluster(decode=1) as running:
        error = error_of(await lose_first(running, event_bytes(ASK, 3), ASK))
        assert error["message"] == (
            "decode worker decode-0 closed the connection in the middle of its reply; the stream does not go on: "
            "no other decode worker is available"
        )
        await running.idle()


@pytest.mark.parametrize(
    ("ask", "settings", "why"),
    [
        ({"frequency_penalty": 1}, {}, "the request sets frequency_penalty"),
        ({"logprobs": 1}, {}, "the request sets logprobs"),
        ({"n": 2}, {}, "the request has n > 1"),
        ({"temperature": 1}, {"continue_sampled": False}, "the request is sampled"),
        ({}, {"continue_max_tokens": 2}, "its output has over 2 tokens"),
    ],
)
@story
async def test_a_stream_that_cannot_go_on_ends_with_an_error_that_says_why(
    ask: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    async with cluster(**settings) as running:
        followed = "continue_max_tokens" in settings
        reply = await lose_first(running, event_bytes(ASK, 4, followed=followed), {**ASK, **ask})
        assert why in error_of(reply)["message"]
        assert running.metric("continuations_total", outcome="refused") == 1
        assert "return_token_ids" not in running.decode[0].seen[0].json or followed


@story
async def test_switched_off_nothing_is_asked_of_workers_and_nothing_said() -> None:
    async with cluster(continue_streams=False) as running:
        reply = await lose_first(running, event_bytes(ASK, 2, followed=False), ASK)
        assert "return_token_ids" not in running.decode[0].seen[0].json
        assert error_of(reply)["message"].endswith("in the middle of its reply")
        assert running.metric("continuations_total", outcome="refused") == 0


@story
async def test_a_reply_that_is_no_stream_after_all_is_cut_where_it_broke() -> None:
    async with cluster() as running, running.client() as client:
        running.decode[0].answer = half(400)
        client.post(json.dumps(ASK).encode())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.reply()
        await running.idle()
        assert running.metric("continuations_total", outcome="resumed") == 0


@story
async def test_a_client_that_leaves_while_its_stream_goes_on_leaves_nothing_behind() -> None:
    async with cluster() as running, running.client() as client:
        running.decode[0].answer, running.decode[1].answer = ends(event_bytes(ASK, 3)), hang
        client.post(json.dumps(ASK).encode())
        await eventually(lambda: len(running.decode[1].seen) == 1)
        client.leave()
        await running.idle()
        assert running.metric("client_disconnects_total", window="stream") == 1
        await eventually(lambda: running.decode[1].aborted == 1)


@story
async def test_a_client_that_does_not_read_pauses_a_stream_that_is_followed() -> None:
    written, size = 0, 256 << 10

    async def flood(engine: FakeEngine, exchange: Exchange) -> None:
        nonlocal written
        engine.collect(exchange.seen)
        exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        for _ in range(160):
            exchange.chunk(b": %b\n\n" % (b"x" * size))
            await exchange.writer.drain()
            written += size
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.write(b"0\r\n\r\n")

    async with cluster(decode=1) as running, running.client() as client:
        client.reader._limit = 1024  # type: ignore[attr-defined]  # the client's own buffer
        running.decode[0].answer = flood
        client.post(json.dumps(ASK).encode())
        await eventually(lambda: any(connection.full for connection in running.gateway.clients))
        await asyncio.sleep(0.1)
        assert written < 160 * size / 2
