"""Keys, limits and the queue, from a client's socket to the workers'."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from fake_engine import Exchange, FakeEngine, event, hang, serve_well
from stories import Cluster, RawClient, cluster, eventually, story

from coterie.gateway.edge.access import read_access
from coterie.gateway.edge.keys import digest

ALICE, BOB = "coterie-alice", "coterie-bob"
ASK = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3, "stream": True}).encode()


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


def key_file(folder: Path, names: tuple[str, ...] = ("alice", "bob"), **limits: int) -> str:
    """A file with those of the two keys; the limits are Alice's."""
    file = folder / "keys.yaml"
    entries = [{"name": "alice", "sha256": digest(ALICE), **limits}, {"name": "bob", "sha256": digest(BOB)}]
    file.write_text(yaml.safe_dump([entry for entry in entries if entry["name"] in names]))
    return str(file)


async def queued(running: Cluster, client: RawClient, waiting: int, headers: str = "") -> None:
    """Send a request, and see it become the last of so many that wait."""
    client.post(ASK, headers=headers)
    await eventually(lambda: running.metric("queue_length") == waiting)


class Held:
    """Lets a prefill worker hold what it gets until it is told to go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.order: list[str] = []

    async def __call__(self, engine: FakeEngine, exchange: Exchange) -> None:
        self.order.append(exchange.seen.headers["x-request-id"])
        await self.go_on.wait()
        await serve_well(engine, exchange)


# --- keys --------------------------------------------------------------------------------------------


@story
async def test_without_keys_the_clients_authorization_goes_to_the_workers() -> None:
    async with cluster(decode=1) as running:
        assert (await running.post(ASK, headers=bearer("theirs"))).status == 200
        assert [engine.seen[0].headers["authorization"] for engine in running.engines] == ["Bearer theirs"] * 2


@story
async def test_a_key_that_is_known_gets_in_and_goes_no_further(tmp_path: Path) -> None:
    async with cluster(decode=1, api_keys=key_file(tmp_path)) as running:
        assert (await running.post(ASK, headers=bearer(ALICE))).status == 200
        assert not any("authorization" in engine.seen[0].headers for engine in running.engines)


@pytest.mark.parametrize("headers", ["", bearer("coterie-eve")])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nowhere"])
@story
async def test_any_other_is_refused_as_openai_does(tmp_path: Path, path: str, headers: str) -> None:
    async with cluster(api_keys=key_file(tmp_path)) as running:
        reply = await running.post(ASK, path=path, headers=headers)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        error = reply.json["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert "eve" not in error["message"]
        assert not any(engine.seen for engine in running.engines)
        assert running.metric("refusals_total", reason="invalid_api_key") == 1


@story
async def test_the_key_is_looked_at_before_the_body_is_read(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path)) as running, running.client() as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 60000000\r\n\r\n"
        )
        assert (await client.reply()).status == 401
        assert await client.at_end()


@story
async def test_health_needs_no_key(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path)) as running:
        assert (await running.get("/health")).status == 200


@story
async def test_the_log_names_the_key_and_does_not_hold_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with cluster(api_keys=key_file(tmp_path)) as running:
            await running.post(ASK, headers=bearer(ALICE))
    lines = [json.loads(record.message) for record in caplog.records if record.name == "coterie.requests"]
    assert [line["key"] for line in lines] == ["alice"]
    assert ALICE not in caplog.text


@story
async def test_workers_are_shown_their_own_key_by_clients_requests_and_by_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wants_key(engine: FakeEngine, exchange: Exchange) -> None:
        assert exchange.seen.headers["authorization"] == "Bearer of-workers"
        await serve_well(engine, exchange)

    monkeypatch.setenv("OF_WORKERS", "of-workers")
    async with cluster(decode=1, api_keys=key_file(tmp_path), worker_key_env="OF_WORKERS", answer=wants_key) as running:
        assert (await running.post(ASK, headers=bearer(BOB))).status == 200
        asked = running.engines[0].gets + running.engines[1].gets
        assert {seen.target for seen in asked} >= {"/health", "/v1/models", "/metrics"}
        assert all(seen.headers["authorization"] == "Bearer of-workers" for seen in asked)


# --- limits of a key ---------------------------------------------------------------------------------


@story
async def test_more_in_flight_than_a_key_may_have_gets_429_and_another_key_none(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path, max_in_flight=1)) as running, running.client() as client:
        running.prefill[0].answer = held = Held()
        client.post(ASK, headers=bearer(ALICE))
        await eventually(lambda: len(held.order) == 1)
        reply = await running.post(ASK, headers=bearer(ALICE))
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert (reply.json["error"]["type"], reply.json["error"]["code"]) == ("requests", "rate_limit_exceeded")
        held.go_on.set()
        assert (await running.post(ASK, headers=bearer(BOB))).status == 200
        assert (await client.reply()).status == 200
        assert (await running.post(ASK, headers=bearer(ALICE))).status == 200
        assert running.metric("refusals_total", reason="max_in_flight") == 1
        await running.idle()


@story
async def test_a_client_that_leaves_is_no_longer_in_flight(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path, max_in_flight=1)) as running, running.client() as client:
        running.prefill[0].answer = hang
        client.post(ASK, headers=bearer(ALICE))
        await eventually(lambda: bool(running.prefill[0].seen))
        client.leave()
        await running.idle()
        running.prefill[0].answer = serve_well
        assert (await running.post(ASK, headers=bearer(ALICE))).status == 200


@story
async def test_requests_per_minute_are_kept_and_retry_after_says_when(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path, requests_per_minute=2)) as running:
        replies = [await running.post(ASK, headers=bearer(ALICE)) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert replies[2].headers["retry-after"] == "30"


@pytest.mark.parametrize(
    ("body", "usage", "used"),
    [
        (ASK, {"prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5}, 12),
        (STREAM, {"prompt_tokens": 7, "total_tokens": 11, "completion_tokens": 4}, 11),
        (STREAM, None, 7 + 3),  # the fake prefill server's 7, and three events before [DONE]
    ],
)
@story
async def test_tokens_are_counted_as_the_engine_counts_them_or_by_events(
    tmp_path: Path, body: bytes, usage: dict[str, int] | None, used: int
) -> None:
    async def with_usage(engine: FakeEngine, exchange: Exchange) -> None:
        if exchange.seen.is_prefill or usage is None:
            await serve_well(engine, exchange)
            return
        tail = json.dumps({"choices": [{"text": '"total_tokens": 99}'}], "usage": usage}).encode()
        if body is ASK:
            exchange.full(200, tail)
            return
        exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        exchange.chunk(event("t") + b"data: " + tail[:-22])
        await asyncio.sleep(0.02)  # so that the figure comes in two pieces
        exchange.chunk(tail[-22:] + b"\n\ndata: [DONE]\n\n")
        exchange.write(b"0\r\n\r\n")

    async with cluster(decode=1, api_keys=key_file(tmp_path, tokens_per_minute=1), answer=with_usage) as running:
        assert (await running.post(body, headers=bearer(ALICE))).status == 200
        reply = await running.post(body, headers=bearer(ALICE))
        assert (reply.status, reply.json["error"]["type"]) == (429, "tokens")
        # One a minute: what was used, that it began with one, and that one must be there.
        assert int(reply.headers["retry-after"]) == used * 60


@story
async def test_keys_that_are_replaced_count_on_where_they_stay_as_they_are(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path, requests_per_minute=1)) as running:
        ask = partial(running.post, ASK, headers=bearer(ALICE))
        assert [(await ask()).status for _ in range(2)] == [200, 429]
        running.gateway.entrance.access = read_access(running.gateway.config, {})
        assert (await ask()).status == 429
        key_file(tmp_path, requests_per_minute=2)
        running.gateway.entrance.access = read_access(running.gateway.config, {})
        assert [(await ask()).status for _ in range(3)] == [200, 200, 429]
        key_file(tmp_path, names=("bob",))
        running.gateway.entrance.access = read_access(running.gateway.config, {})
        assert (await ask()).status == 401


# --- the queue ---------------------------------------------------------------------------------------


@story
async def test_requests_wait_for_their_turn_and_keys_take_turns(tmp_path: Path) -> None:
    async with cluster(api_keys=key_file(tmp_path), max_in_flight=1) as running:
        running.prefill[0].answer = held = Held()
        names = ["a1", "a2", "a3", "b1"]
        keys = {"a": ALICE, "b": BOB}
        posts = []
        for waiting, name in enumerate(names):
            headers = f"X-Request-Id: {name}\r\n{bearer(keys[name[0]])}"
            posts.append(asyncio.ensure_future(running.post(ASK, headers=headers)))
            await eventually(lambda expected=waiting: running.metric("queue_length") == expected)
            await eventually(lambda: bool(held.order))
        assert held.order == ["a1"]
        held.go_on.set()
        assert [reply.status for reply in await asyncio.gather(*posts)] == [200] * 4
        assert held.order == ["a1", "a2", "b1", "a3"]
        assert running.metric("queue_seconds_count") == 4
        await running.idle()


@story
async def test_a_full_queue_refuses_with_503_and_says_when_to_come_back() -> None:
    async with cluster(max_in_flight=1, max_queue=1) as running, running.client() as first, running.client() as second:
        running.prefill[0].answer = hang
        first.post(ASK)
        await eventually(lambda: bool(running.prefill[0].seen))
        await queued(running, second, 1)
        reply = await running.post(ASK)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert (reply.json["error"]["type"], reply.json["error"]["code"]) == ("unavailable_error", "queue_full")
        assert "x-request-id" in reply.headers
        assert running.metric("refusals_total", reason="queue_full") == 1


@story
async def test_who_waits_too_long_gets_503() -> None:
    async with cluster(max_in_flight=1, queue_timeout_s=0.05) as running, running.client() as client:
        running.prefill[0].answer = hang
        client.post(ASK)
        await eventually(lambda: bool(running.prefill[0].seen))
        reply = await running.post(ASK)
        assert (reply.status, reply.json["error"]["code"]) == (503, "queue_timeout")
        assert running.metric("queue_length") == 0


@story
async def test_who_leaves_the_queue_is_taken_out_and_no_worker_hears_of_it() -> None:
    async with cluster(max_in_flight=1) as running, running.client() as first, running.client() as second:
        running.prefill[0].answer = held = Held()
        first.post(ASK)
        await eventually(lambda: bool(held.order))
        await queued(running, second, 1)
        second.leave()
        await eventually(lambda: running.metric("queue_length") == 0)
        assert running.metric("client_disconnects_total", window="queue") == 1
        held.go_on.set()
        assert (await first.reply()).status == 200
        assert len(running.prefill[0].seen) == 1
        await running.idle()


@story
async def test_a_place_is_kept_until_the_end_of_the_reply() -> None:
    async with cluster(decode=1, max_in_flight=1) as running, running.client() as first, running.client() as second:
        running.decode[0].answer = held = Held()
        first.post(STREAM)
        await eventually(lambda: bool(held.order))
        await queued(running, second, 1)
        assert len(running.prefill[0].seen) == 1  # no KV is made for who cannot go on
        held.go_on.set()
        assert (await first.reply()).status == 200
        assert (await second.reply()).status == 200


@story
async def test_those_that_wait_when_the_gateway_stops_get_503_and_running_ones_their_reply() -> None:
    async with cluster(max_in_flight=1) as running, running.client() as first, running.client() as second:
        running.prefill[0].answer = held = Held()
        first.post(ASK)
        await eventually(lambda: bool(held.order))
        await queued(running, second, 1)
        stopping = asyncio.ensure_future(running.gateway.finish(5.0))
        reply = await second.reply()
        assert (reply.status, reply.json["error"]["code"]) == (503, "stopping")
        assert reply.headers["connection"] == "close"
        held.go_on.set()
        reply = await first.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        await stopping


@story
async def test_without_a_bound_nothing_waits() -> None:
    async with cluster() as running:
        replies = await asyncio.gather(*(running.post(ASK) for _ in range(20)))
        assert {reply.status for reply in replies} == {200}
        assert running.metric("queue_seconds_count") == 0


@story
async def test_a_bound_that_is_lifted_lets_in_those_that_wait() -> None:
    async with cluster(max_in_flight=1) as running, running.client() as first, running.client() as second:
        running.prefill[0].answer = held = Held()
        first.post(ASK)
        await eventually(lambda: bool(held.order))
        await queued(running, second, 1)
        running.gateway.configure(replace(running.gateway.config, max_in_flight=0))
        await eventually(lambda: len(held.order) == 2)
        held.go_on.set()
        assert [(await client.reply()).status for client in (first, second)] == [200, 200]
        await running.idle()
