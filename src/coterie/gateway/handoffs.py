"""Handoffs: KV that a prefill worker keeps until a decode worker has taken it, or it is released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from coterie.engines.base import Call, Engine, Handoff
from coterie.errors import EngineError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.faults import Faults
from coterie.gateway.journey import Journey
from coterie.gateway.metrics import Metrics
from coterie.gateway.retry import LegFailed
from coterie.gateway.stream import Relay
from coterie.gateway.turns import Turnstile
from coterie.gateway.upstream import Collected, Patience, UpstreamError
from coterie.gateway.workers import Fleet

MAX_REPLY_BYTES = 64 << 20
"""Of a prefill worker, whose counts may be large, and of a release."""


class Held:
    """One handoff from its prefill reply until it is taken or released.

    Attributes:
        handoff: what the prefill worker said.
        call: the request that it is of.
        headers: header lines for the workers.
        prefill: name of the worker that keeps the KV.
        since_s: when it answered, on the loop's clock.
    """

    __slots__ = ("call", "handoff", "headers", "prefill", "since_s")

    def __init__(self, handoff: Handoff, call: Call, headers: bytes, prefill: str, since_s: float) -> None:
        self.handoff = handoff
        self.call = call
        self.headers = headers
        self.prefill = prefill
        self.since_s = since_s


class Handoffs:
    """All handoffs of this gateway: each ends once, taken by a decode worker or released.

    Args:
        engine: the dialect of the workers.
        decode: the workers that can release one.
        faults: is told of releases that fail.
        metrics: counts releases.
        turnstile: where large replies are read.

    Attributes:
        open: those of which neither has happened yet, oldest first.
        background: releases under way.
    """

    def __init__(self, engine: Engine, decode: Fleet, faults: Faults, metrics: Metrics, turnstile: Turnstile) -> None:
        self.open: dict[Held, None] = {}
        self.background: set[asyncio.Task[None]] = set()
        self._engine = engine
        self._decode = decode
        self._faults = faults
        self._metrics = metrics
        self._turnstile = turnstile
        self._loop = asyncio.get_running_loop()

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next handoff on: how old one may grow, how long a release may take."""
        self._most_s = config.max_handoff_s
        self._patience = Patience(config.first_byte_timeout_s, config.idle_timeout_s)

    def hold(self, journey: Journey, call: Call, handoff: Handoff) -> None:
        """A prefill worker keeps KV for a request."""
        journey.held = self._open(journey, call, handoff)

    def check_age(self, journey: Journey) -> None:
        """Refuse to have a handoff decoded that the prefill worker may no longer keep.

        Raises:
            LegFailed: it is older than `--max-handoff-s`.
        """
        held = journey.held
        if held is not None and self._loop.time() - held.since_s > self._most_s:
            error = EngineError(f"KV waited at prefill worker {held.prefill} for more than {self._most_s:g} s")
            raise LegFailed("decode", "", "too old", error=error, sent=False)

    def end(self, journey: Journey, *, left: bool) -> None:
        """The request is over: release its KV unless a decode worker has taken it.

        Args:
            journey: the request.
            left: whether it was cut short, as by its client's leaving.
        """
        held = journey.held
        if held is None:
            return
        if _taken(journey.relay, left=left):
            journey.held = None
            del self.open[held]
        else:
            self.give_up(journey)

    def give_up(self, journey: Journey) -> None:
        """Release the KV of a request in the background, and forget what was made of it; without KV, nothing."""
        held, journey.held, journey.relay = journey.held, None, None
        if held is not None:
            self._release(held, journey.decision.worker if journey.decision else "")

    def release_late(self, journey: Journey, call: Call, reply: Collected) -> None:
        """The client has left; the reply may be here all the same, or be on its way, and names KV that waits."""

        def release() -> None:
            if reply.status == 200:
                self._run(self._read_and_release(journey, call, reply))

        if reply.complete:
            release()
        else:
            reply.on_complete = release

    async def _read_and_release(self, journey: Journey, call: Call, reply: Collected) -> None:
        with contextlib.suppress(EngineError):  # such a reply names none
            handoff = self._engine.handoff(*await self._turnstile.read_reply(reply.large_body()))
            self._release(self._open(journey, call, handoff), "")

    def _open(self, journey: Journey, call: Call, handoff: Handoff) -> Held:
        held = Held(handoff, call, journey.headers, journey.prefill, self._loop.time())
        self.open[held] = None
        return held

    def _release(self, held: Held, tried: str) -> None:
        del self.open[held]
        self._run(self._release_now(held, tried))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _release_now(self, held: Held, tried: str) -> None:
        """Free a handoff by having a decode worker collect it; where that fails, the engine's own lease ends it."""
        workers = self._decode.available()
        if not workers:
            self._metrics.released.inc("no worker")
            return
        worker = next((worker for worker in workers if worker.name != tried), workers[0])
        reply = Collected(MAX_REPLY_BYTES)
        body = self._engine.release_body(held.call, held.handoff)
        try:
            await worker.pool.post(held.call.path.encode(), held.headers, body, reply, self._patience)
        except UpstreamError as error:
            self._faults.lost(worker, error)
            self._metrics.released.inc("failed")
            return
        self._metrics.released.inc("released" if reply.status < 500 else "failed")


def _taken(relay: Relay | None, *, left: bool) -> bool:
    """Whether the decode leg has disposed of the handoff.

    A decode server that began its reply with 200 has taken it, and so has one whose request was cancelled after it was
    sent.  One that could not be reached, failed, or refused the request has not: vLLM tells the prefill server of some
    refusals and not of others.  A release too many costs an error that no client sees.
    """
    if relay is None or not relay.sent:
        return False
    return left or (relay.first_byte_s is not None and relay.head is not None and relay.head.status < 400)
