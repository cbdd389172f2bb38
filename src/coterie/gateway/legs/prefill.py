"""The prefill leg: one worker computes the prompt and keeps its KV, or answers by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from coterie.core import RouteRequest
from coterie.engines.base import Body, Call, Engine, Prefilled
from coterie.errors import EngineError
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.legs.answers import identity, pass_through, rewritten
from coterie.gateway.legs.faults import Faults
from coterie.gateway.legs.handoffs import MAX_REPLY_BYTES, Handoffs
from coterie.gateway.legs.journey import Journey
from coterie.gateway.legs.retry import RETRIED_STATUS, LegFailed
from coterie.gateway.legs.stream import Relay
from coterie.gateway.legs.turns import Turnstile
from coterie.gateway.legs.upstream import Collected, Patience, UpstreamError
from coterie.gateway.metrics import Metrics


class PrefillLeg:
    """Has prompts computed.

    Attributes:
        patience: how long a worker may take.
    """

    patience: Patience

    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        handoffs: Handoffs,
        faults: Faults,
        metrics: Metrics,
        turnstile: Turnstile,
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._handoffs = handoffs
        self._faults = faults
        self._metrics = metrics
        self._turnstile = turnstile
        self._loop = asyncio.get_running_loop()

    async def run(self, journey: Journey, call: Call, asked: RouteRequest, avoid: Set[str]) -> bool:
        """Choose a worker and send it the request.

        Returns:
            whether a decode worker is needed; if not, the client has its answer.

        Raises:
            NoWorkerError: none is available.
            LegFailed: the worker could not do it; another may, unless the client has been sent a part of the reply.
        """
        worker, decision = self._fleet.choose(asked, avoid)
        journey.prefill, journey.window = worker.name, "prefill"
        self._metrics.decided("prefill", decision)
        if call.prefill_only:
            await self._relay(worker, journey, call, asked)
            return False
        reply = await self._compute(worker, journey, call, asked)
        if reply.status != 200 and journey.reply.status:
            raise LegFailed("prefill", worker.name, "status", answer=reply)
        if reply.status != 200:
            pass_through(journey.reply, reply, journey.id)
            return False
        prefilled = await self._read(worker, journey, call, reply)
        if prefilled.ended and not reply.is_large and not journey.reply.status:
            self._answer(journey, call, reply)
            return False
        if prefilled.handoff is None:
            journey.not_split = "no handoff"
            self._metrics.not_split.inc("no handoff")
        journey.window = "handoff"
        return True

    async def _relay(self, worker: Worker, journey: Journey, call: Call, asked: RouteRequest) -> None:
        """Have the worker answer by itself: it has the only token when the prompt is done, and keeps no KV."""
        relay = journey.relay = Relay(journey.reply, identity(journey.id), self._loop)
        await self._post(worker, journey, self._engine.decode_body(call, None), relay, asked)
        if relay.refusal is not None:
            raise LegFailed("prefill", worker.name, "status", answer=relay.refusal)
        self._metrics.answered_by_prefill.inc("one token")

    async def _compute(self, worker: Worker, journey: Journey, call: Call, asked: RouteRequest) -> Collected:
        reply = Collected(MAX_REPLY_BYTES, wanted_late=True)
        try:
            await self._post(worker, journey, self._engine.prefill_body(call), reply, asked)
        except asyncio.CancelledError:
            self._handoffs.release_late(journey, call, reply)
            raise
        if reply.status in RETRIED_STATUS:
            raise LegFailed("prefill", worker.name, "status", answer=reply)
        return reply

    async def _post(
        self, worker: Worker, journey: Journey, body: Body, reply: Collected | Relay, asked: RouteRequest
    ) -> None:
        start_s = self._loop.time()
        with self._fleet.ledger.lease(worker.name, asked):
            try:
                await worker.pool.post(journey.request.target, journey.headers, body, reply, self.patience)
            except UpstreamError as error:
                self._faults.lost(worker, error)
                begun = journey.reply.status > 0
                raise LegFailed("prefill", worker.name, error.kind, error=error, begun=begun) from None
        journey.prefill_s = self._loop.time() - start_s
        assert reply.head is not None
        self._faults.answered(worker, reply.head.status)

    async def _read(self, worker: Worker, journey: Journey, call: Call, reply: Collected) -> Prefilled:
        """Read the reply; KV that it names is held from now on."""
        try:
            prefilled = self._engine.prefilled(*await self._turnstile.read_reply(reply.large_body()))
        except asyncio.CancelledError:
            self._handoffs.release_late(journey, call, reply)
            raise
        except EngineError as error:
            named = EngineError(f"prefill worker {worker.name}: {error}")
            self._faults.talked_nonsense(worker, str(named))
            raise LegFailed("prefill", worker.name, "nonsense", error=named) from None
        if prefilled.handoff is not None:
            self._handoffs.hold(journey, call, prefilled.handoff)
        return prefilled

    def _answer(self, journey: Journey, call: Call, reply: Collected) -> None:
        """The first token ended the output: a decode worker would only compute it again."""
        answer = self._engine.answer(call, reply.body())
        rewritten(journey.reply, reply, answer, journey.id)
        self._metrics.answered_by_prefill.inc("ended")
