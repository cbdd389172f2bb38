"""Handoffs: KV that a prefill worker keeps until a decode worker has taken it, or it is released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from coterie.engines.base import Body, Call, Engine, Handoff
from coterie.errors import EngineError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.legs.faults import Faults
from coterie.gateway.legs.journey import Journey
from coterie.gateway.legs.retry import LegFailed
from coterie.gateway.legs.stream import Relay
from coterie.gateway.legs.turns import Turnstile
from coterie.gateway.legs.upstream import Collected, Patience, UpstreamError
from coterie.gateway.metrics import Metrics

MAX_REPLY_BYTES = 64 << 20
"""Of a prefill worker, whose counts may be large, and of a release."""


RELEASE_S = 25.0
"""The longest that a release may take: then the workers' own lease is about to end the handoff anyway."""


class Held:
    """One handoff from its prefill reply until it is taken or released.

    Attributes:
        handoff: what the prefill worker said.
        call: the request that it is of.
        journey: the same on its way.
        prefill: name of the worker that keeps the KV.
        since_s: when it answered, on the loop's clock.
        relay: the reply of the decode worker that was last given it; None if none was.
    """

    __slots__ = ("call", "handoff", "journey", "prefill", "relay", "since_s")

    def __init__(self, handoff: Handoff, call: Call, journey: Journey, since_s: float) -> None:
        self.handoff = handoff
        self.call = call
        self.journey = journey
        self.prefill = journey.prefill
        self.since_s = since_s
        self.relay: Relay | None = None

    @property
    def waits(self) -> bool:
        """Whether the KV may still be where it was: until a stream begins, else until the request is sent."""
        if self.relay is None:
            return True
        return self.relay.first_byte_s is None if self.call.stream else not self.relay.sent


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
        metrics.show("handoffs_waiting", "KV that prefill workers keep for requests on their way.", self.waiting)
        metrics.show("handoff_oldest_seconds", "Age of the oldest of them.", self.oldest_s)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next handoff on: how old one may grow, how long a release may take."""
        self._most_s = config.max_handoff_s
        release_s = min(RELEASE_S, config.first_byte_timeout_s)
        self._patience = Patience(release_s, release_s)

    def waiting(self) -> int:
        """How many handoffs no decode worker is known to have taken."""
        return sum(held.waits for held in self.open)

    def oldest_s(self) -> float:
        """Age of the oldest of them; 0 if there is none."""
        since_s = next((held.since_s for held in self.open if held.waits), None)
        return 0.0 if since_s is None else self._loop.time() - since_s

    def kept_by(self, prefill: str) -> bool:
        """Whether a prefill worker may keep KV of a request on its way."""
        return any(held.prefill == prefill and not _begun(held.relay) for held in self.open)

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
        relay = held.relay
        if _taken(relay, left=left):
            journey.held = None
            del self.open[held]
            if held.call.stream and relay is not None and relay.first_byte_s is not None:
                self._metrics.handoff_s.observe(relay.first_byte_s - held.since_s)
        else:
            self.give_up(journey)

    def give_up(self, journey: Journey) -> None:
        """Release the KV of a request in the background; without KV, nothing."""
        held, journey.held = journey.held, None
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
        held = Held(handoff, call, journey, self._loop.time())
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
        """Free a handoff; where nobody can, the engine's own lease ends it.

        A request that a decode worker refuses costs nothing, but has an effect only if the two workers are connected.
        One that it runs has the KV moved first.
        """
        worker = self._whom(held, tried)
        if worker is None:
            self._metrics.released.inc("no worker")
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                done = held.prefill in worker.met and await self._refused(worker, held)
                done = done or await self._collected(worker, held)
        except (TimeoutError, UpstreamError) as error:
            if isinstance(error, UpstreamError):
                self._faults.lost(worker, error)
            done = False
        self._metrics.released.inc("released" if done else "failed")

    def _whom(self, held: Held, tried: str) -> Worker | None:
        """The decode worker to ask: one that is connected, and not the one that was tried, if there is such."""
        workers = self._decode.available()
        return min(workers, key=lambda worker: (worker.name == tried, held.prefill not in worker.met), default=None)

    async def _refused(self, worker: Worker, held: Held) -> bool:
        path, body = self._engine.refusal(held.handoff)
        return await self._post(worker, held, path, body) == 404

    async def _collected(self, worker: Worker, held: Held) -> bool:
        status = await self._post(worker, held, held.call.path, self._engine.release_body(held.call, held.handoff))
        return status < 500

    async def _post(self, worker: Worker, held: Held, path: str, body: Body) -> int:
        reply = Collected(MAX_REPLY_BYTES)
        await worker.pool.post(path.encode(), held.journey.headers, body, reply, self._patience)
        return reply.status


def _begun(relay: Relay | None) -> bool:
    return relay is not None and relay.first_byte_s is not None


def _taken(relay: Relay | None, *, left: bool) -> bool:
    """Whether the decode leg has disposed of the handoff.

    A decode server that began its reply with 200 has taken it, and so has one whose request was cancelled after it was
    sent.  One that could not be reached, failed, or refused the request has not: vLLM tells the prefill server of some
    refusals and not of others.  A release too many costs an error that no client sees.
    """
    if relay is None or not relay.sent:
        return False
    if relay.head is None:
        return left
    return relay.head.status < 400 and (left or _begun(relay))
