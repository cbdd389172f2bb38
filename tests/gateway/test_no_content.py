"""What clients and models say is in no log, no metric, no admin page and none of the gateway's own errors."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from fake_engine import Answer, Exchange, FakeEngine, event, refuse, serve_well
from stories import Cluster, cluster, post, story

SECRET = "zanzibar"
"""Stands for content: it is in every request of this file, each time elsewhere."""

WELL = {"model": "tiny", "prompt": SECRET, "max_tokens": 3}
PLAIN = {**WELL, "prompt": "a b c"}
NAMES = ("X-Secret", "Authorization", "X-Coterie-Session", "X-Coterie-Domain")
HEADERS = "".join(f"{name}: {SECRET}\r\n" for name in NAMES)


def of(body: object, headers: str = "", path: str = "/v1/completions") -> bytes:
    return post(body if isinstance(body, bytes) else json.dumps(body).encode(), path, f"Connection: close\r\n{headers}")


REQUESTS = {
    "prompt": of(WELL),
    "streamed": of({**WELL, "stream": True}),
    "chat": of({"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}, path="/v1/chat/completions"),
    "not split": of({**WELL, "echo": True}),
    "headers": of(WELL, HEADERS),
    "field name": of({**WELL, SECRET: SECRET}),
    "query": of(PLAIN, path=f"/v1/completions?key={SECRET}"),
    "path": of(PLAIN, path=f"/{SECRET}"),
    "method": of(PLAIN).replace(b"POST", SECRET.upper().encode(), 1),
    "bad JSON": of(b'{"prompt": "' + SECRET.encode()),
    "bad JSON behind a value": of(b'{"prompt": "a"} ' + SECRET.encode()),
    "not an object": of([SECRET]),
    "bytes that are no text": of(b'{"prompt": "' + SECRET.encode() + b'\xff"}'),
    "limit": of({**WELL, "max_tokens": SECRET}),
    "stream flag": of({**WELL, "stream": SECRET}),
    "model": of({**WELL, "model": [SECRET]}),
    "extra": of({**WELL, "vllm_xargs": SECRET}),
    "request id": of(WELL, f"X-Request-Id: {SECRET} {SECRET}\r\n"),
    "session": of(WELL, f"X-Coterie-Session: {SECRET} {SECRET}\r\n"),
    "coding": of(WELL, f"Transfer-Encoding: {SECRET}\r\n").replace(b"content-length", b"x"),
    "header without a colon": of(WELL, f"{SECRET}\r\n"),
    "control character": of(WELL, f"X: {SECRET}\x01\r\n"),
    "chunk size": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    + SECRET.encode()
    + b"\r\n",
    "version": of(WELL).replace(b"HTTP/1.1", SECRET.encode(), 1),
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sending(data: bytes) -> Answer:
    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.write(data)
        await exchange.writer.drain()
        await asyncio.sleep(0.02)
        exchange.close()

    return answer


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SAID = SECRET.encode()
FAILURES: dict[str, Answer] = {
    "error of its own": refuse(500, b'{"error": {"message": "%b"}}' % SAID),
    "no such request": refuse(400, b'{"error": {"message": "%b"}}' % SAID),
    "not HTTP": sending(SAID + b"\r\n\r\n"),
    "bad header": sending(HEAD + SAID + b"\r\n\r\n"),
    "coding": sending(HEAD + b"transfer-encoding: " + SAID + b"\r\n\r\n"),
    "chunk size": sending(STREAM_HEAD + SAID + b"\r\n"),
    "chunk longer than it says": sending(STREAM_HEAD + b"1\r\n" + SAID + b"\r\n"),
    "reply that is no JSON": refuse(200, SAID),
    "reply of another shape": refuse(200, json.dumps({"choices": SECRET, "kv_transfer_params": SECRET}).encode()),
    "handoff of another shape": refuse(
        200, json.dumps({"kv_transfer_params": {"remote_request_id": SECRET, "a": SECRET}}).encode()
    ),
    "cut within an event": sending(STREAM_HEAD + b"9\r\ndata: %b" % SAID[:3]),
    "cut between events": sending(STREAM_HEAD + chunk(event(SECRET))),
    "error as an event": sending(STREAM_HEAD + chunk(b'data: {"error": {"message": "%b"}}\n\n' % SAID) + b"0\r\n\r\n"),
    "event that is no JSON": sending(STREAM_HEAD + chunk(b"data: %b\n\n" % SAID) + b"0\r\n\r\n"),
    "event of another shape": sending(STREAM_HEAD + chunk(b'data: {"choices": "%b"}\n\n' % SAID) + b"0\r\n\r\n"),
}


async def answered(running: Cluster, sent: bytes) -> bytes:
    """What a client gets that sends this, to the connection's end."""
    async with running.client() as client:
        client.send(sent)
        try:
            return await asyncio.wait_for(client.reader.read(), 5)
        except ConnectionError:
            return b""


async def check_admin_side(running: Cluster) -> None:
    async with httpx.AsyncClient(base_url=running.admin_url) as client:
        for path in ("/metrics", "/workers", "/decisions", "/policies", "/config"):
            assert SECRET not in (await client.get(path)).text.lower(), path


@story
async def test_of_requests_good_and_bad(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with cluster(decode=1, decode_policy="marginal") as running:
            for name, sent in REQUESTS.items():
                reply = await answered(running, sent)
                assert SECRET not in reply.decode("latin-1").lower(), name
            await check_admin_side(running)
            await running.idle()
    assert '"path":"/v1/completions"' in caplog.text  # so the log was looked at
    assert SECRET not in caplog.text.lower()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@story
async def test_of_replies_that_are_wrong(role: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with cluster(decode=1, decode_policy="marginal", breaker_failures=1000) as running:
            for failure in FAILURES.values():
                engine = running.prefill[0] if role == "prefill" else running.decode[0]
                engine.answer = failure
                for stream in (False, True):
                    await answered(running, of({**PLAIN, "stream": stream, "max_tokens": 30}))
                engine.answer = serve_well
            await check_admin_side(running)
            await running.idle()
    assert "worker" in caplog.text
    assert SECRET not in caplog.text.lower()
