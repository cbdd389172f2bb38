"""Laws that hold after any script of failures, retries and disconnects.

Each request carries its own script: what becomes of its first, second, ... attempt at each role and of its releases,
and whether its client stays.  So many requests can fail in many ways at once, in front of few workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop
from fake_engine import Answer, Exchange, FakeEngine, die_after, garbage, hang, refuse, reset, serve_well
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stories import Cluster, RawClient, Reply, cluster

from coterie.core import RouteRequest
from coterie.routing import Lease

PHASES = (Phase.explicit, Phase.generate)  # to shrink a script takes a minute
RETRIES = 2
TOKENS = 3


async def slow(engine: FakeEngine, exchange: Exchange) -> None:
    await asyncio.sleep(0.03)
    await serve_well(engine, exchange)


def collecting(then: Answer) -> Answer:
    """Take the KV, then fail."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        await then(engine, exchange)

    return answer


async def hang_until_aborted(engine: FakeEngine, exchange: Exchange) -> None:
    """Never answer; free the KV when the request is aborted, as vLLM does."""
    try:
        await hang(engine, exchange)
    finally:
        engine.collect(exchange.seen)


COMMON: dict[str, Answer] = {
    "well": serve_well,
    "slow": slow,
    "reset": reset,
    "garbage": garbage,
    "400": refuse(400, b"{}"),
    "500": refuse(500, b"{}"),
    "503": refuse(503, b"{}"),
}
FAULTS: dict[str, dict[str, Answer]] = {
    "prefill": {**COMMON, "nonsense": refuse(200, b"nonsense"), "hang": hang},
    "decode": {
        **COMMON,
        "hang": hang_until_aborted,
        "taken, then reset": collecting(reset),
        "head, then reset": die_after(0),
        "two tokens, then reset": die_after(2),
    },
    "release": {name: COMMON[name] for name in ("well", "reset", "503")},
}


@dataclass
class Script:
    """One request, and what becomes of it."""

    stream: bool
    fates: dict[str, list[str]]
    leaves_after_s: float | None

    def next(self, role: str) -> Answer:
        fates = self.fates[role]
        return FAULTS[role][fates.pop(0) if fates else "well"]


def fates(role: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(FAULTS[role])), max_size=RETRIES + 2)


scripts = st.builds(
    Script,
    st.booleans(),
    st.fixed_dictionaries({role: fates(role) for role in FAULTS}),
    st.none() | st.none() | st.floats(0, 0.1),
)


def play(running: Cluster, played: dict[str, Script]) -> None:
    """Have the fakes answer each request by its script."""
    for engine in running.engines:
        role = "prefill" if engine in running.prefill else "decode"

        async def answer(engine: FakeEngine, exchange: Exchange, role: str = role) -> None:
            script = played.get(exchange.seen.headers["x-request-id"])
            part = "release" if role == "decode" and exchange.seen.json["max_tokens"] == 1 else role
            await (script.next(part) if script else serve_well)(engine, exchange)

        engine.answer = answer


@contextlib.contextmanager
def one_lease_at_a_time(running: Cluster) -> Iterator[None]:
    """Check that no request ever holds two places of one role."""
    for fleet in (running.gateway.prefill, running.gateway.decode):
        held: Counter[str] = Counter()
        lease, release = fleet.ledger.lease, fleet.ledger._release

        def counted(worker: str, request: RouteRequest, held: Counter[str] = held, lease=lease) -> Lease:
            held[request.id] += 1
            assert held[request.id] == 1
            return lease(worker, request)

        def uncounted(given: Lease, *rest: object, held: Counter[str] = held, release=release) -> None:
            held[given.request.id] -= 1
            assert held[given.request.id] == 0
            release(given, *rest)

        fleet.ledger.lease, fleet.ledger._release = counted, uncounted
    yield


async def ask(running: Cluster, id_: str, script: Script) -> Reply | None:
    """Send the request; None where the client left, or the reply was cut."""
    body = json.dumps({"model": "tiny", "prompt": "a b", "max_tokens": TOKENS, "stream": script.stream}).encode()
    async with running.client() as client:
        client.post(body, headers=f"x-request-id: {id_}\r\n")
        try:
            reply = await asyncio.wait_for(client.reply(), script.leaves_after_s)
        except TimeoutError:
            return None
        except (asyncio.IncompleteReadError, ConnectionError):
            assert script.leaves_after_s is None or script.stream
            return None
        if reply.headers.get("connection") != "close":
            await nothing_follows(client)
        return reply


async def nothing_follows(client: RawClient) -> None:
    """A second reply to the same request would be taken for that to the next one."""
    client.send(b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await client.reply()).status == 404


def check_answer(script: Script, reply: Reply | None) -> None:
    if reply is None or reply.status != 200:
        return
    tokens = "".join(re.findall(r'"text": "([^"]*)"', reply.body.decode())).split()
    whole = b"worker_lost" not in reply.body
    assert tokens == [f"t{i}" for i in range(TOKENS if whole else len(tokens))]
    assert not script.stream or reply.body.endswith(b"data: [DONE]\n\n")


async def check_laws(batch: list[Script], *, breaker_failures: int) -> None:
    timeouts = {"prefill_timeout_s": 0.15, "first_byte_timeout_s": 0.15, "connect_timeout_s": 1.0}
    async with cluster(
        prefill=2, decode=3, retries=RETRIES, breaker_failures=breaker_failures, health_interval_s=60, **timeouts
    ) as running:
        played = {f"r{i}": script for i, script in enumerate(batch)}
        play(running, played)
        with one_lease_at_a_time(running):
            replies = await asyncio.gather(*(ask(running, id_, script) for id_, script in played.items()))
            await running.idle()
        for script, reply in zip(batch, replies, strict=True):
            check_answer(script, reply)
        check_attempts(running, played)
        check_handoffs(running)


def check_attempts(running: Cluster, played: dict[str, Script]) -> None:
    """A kept connection that was lost as a request was sent is worth a second try at the same worker."""
    for engines, most in ((running.prefill, RETRIES + 1), (running.decode, RETRIES + 1)):
        asked = Counter(
            seen.headers["x-request-id"]
            for engine in engines
            for seen in engine.seen
            if engines is running.prefill or seen.json["max_tokens"] == TOKENS
        )
        assert all(asked[id_] <= 2 * most for id_ in played)


def check_handoffs(running: Cluster) -> None:
    """Every handoff was taken or released, or its release failed.

    Where the client left after a decode worker had been sent the request, that worker frees the KV; these fakes do if
    they were still at it.  A prefill reply that comes after its time names KV of which nobody hears.
    """
    handoffs = running.gateway.dispatcher.handoffs
    assert not handoffs.open
    assert not running.gateway.dispatcher.running
    excused = sum(running.metric("handoffs_released_total", outcome=why) for why in ("failed", "no worker"))
    excused += running.metric("client_disconnects_total", window="decode")
    for name in running.gateway.prefill.workers:
        excused += running.metric("transport_errors_total", worker=name, kind="timeout")
    assert len(running.kv.held) <= excused


@given(st.lists(scripts, min_size=1, max_size=24), st.sampled_from([3, 1000]))
@settings(max_examples=12, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_whatever_fails_every_request_has_one_answer_and_nothing_is_left(batch: list[Script], failures: int) -> None:
    uvloop.run(asyncio.wait_for(check_laws(batch, breaker_failures=failures), 30))


def test_the_law_of_handoffs_can_fail() -> None:
    """KV that nobody releases is seen."""

    async def run() -> None:
        async with cluster() as running:
            running.kv.keep()
            with contextlib.suppress(AssertionError):
                check_handoffs(running)
                raise RuntimeError("it was not seen")

    uvloop.run(run())
