"""The decode leg: the experts of the prompt choose a worker, and its reply is relayed to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from coterie.core import ExpertCounts, RouteRequest
from coterie.engines.base import Body, Call, Engine, Handoff
from coterie.errors import WireError
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.legs.continuation import relay_for
from coterie.gateway.legs.faults import Faults
from coterie.gateway.legs.journey import DecisionLog, Journey
from coterie.gateway.legs.retry import LegFailed
from coterie.gateway.legs.stream import Pace, Relay
from coterie.gateway.legs.upstream import Patience, UpstreamError
from coterie.gateway.metrics import Metrics
from coterie.routing import Reads


class DecodeLeg:
    """Has requests decoded.

    Attributes:
        patience: how long a worker may take.
    """

    patience: Patience

    def __init__(self, engine: Engine, fleet: Fleet, faults: Faults, metrics: Metrics, decisions: DecisionLog) -> None:
        self._engine = engine
        self._fleet = fleet
        self._faults = faults
        self._metrics = metrics
        self._decisions = decisions
        self._loop = asyncio.get_running_loop()

    @property
    def reads(self) -> frozenset[Reads]:
        """What the policy needs to know of a request."""
        assert self._fleet.policy is not None
        return self._fleet.policy.reads

    async def run(self, journey: Journey, call: Call, asked: RouteRequest, avoid: Set[str]) -> None:
        """Choose a worker and relay its reply, to the end.

        Raises:
            NoWorkerError: none is available.
            LegFailed: the worker could not do it; another may, unless the client has been sent a part of the reply.
        """
        handoff = journey.held.handoff if journey.held else None
        routed = self._with_counts(journey, asked, handoff)
        worker, decision = self._fleet.choose(routed, avoid)
        journey.decision, journey.routed = decision, routed
        self._metrics.decided("decode", decision)
        self._decisions.add(journey, routed, decision)
        body = self._engine.decode_body(journey.followed.transcript.call if journey.followed else call, handoff)
        pace = Pace(self._fleet.clock) if self._fleet.ledger.followed else None
        relay = journey.relay = relay_for(journey, self._loop, pace)
        if journey.held is not None:
            journey.held.relay = relay
        journey.window = "decode"
        journey.decode_start_s = self._loop.time()
        with self._fleet.ledger.lease(worker.name, routed) as lease:
            await self._ask(worker, journey, body, relay)
            lease.release(relay.served())

    async def _ask(self, worker: Worker, journey: Journey, body: Body, relay: Relay) -> None:
        try:
            await worker.pool.post(journey.request.target, journey.headers, body, relay, self.patience)
        except UpstreamError as error:
            self._faults.lost(worker, error)
            sent, begun = relay.sent, relay.begun
            raise LegFailed("decode", worker.name, error.kind, error=error, sent=sent, begun=begun) from None
        assert relay.head is not None
        self._faults.answered(worker, relay.head.status)
        if relay.refusal is not None:
            raise LegFailed("decode", worker.name, "status", answer=relay.refusal)
        if relay.cut_short:
            short = UpstreamError(f"{worker.pool.title} ended its stream before the output was complete", "closed")
            self._faults.lost(worker, short)
            raise LegFailed("decode", worker.name, "closed", error=short)

    def _with_counts(self, journey: Journey, asked: RouteRequest, handoff: Handoff | None) -> RouteRequest:
        counts, problem = self._read_counts(journey, handoff)
        return RouteRequest(
            id=asked.id,
            prompt_tokens=handoff.prompt_tokens if handoff else 0,
            output_tokens=asked.output_tokens,
            counts=counts,
            counts_problem=problem,
            domain=asked.domain,
            prompt_hash=asked.prompt_hash,
            prefix=asked.prefix,
            session=asked.session,
        )

    def _read_counts(self, journey: Journey, handoff: Handoff | None) -> tuple[ExpertCounts | None, str | None]:
        if Reads.COUNTS not in self.reads:
            return None, None
        if handoff is None:
            self._metrics.counts_problems.inc("not split")
            return None, f"not split: {journey.not_split}"
        try:
            counts = self._engine.counts(handoff)
        except WireError as error:
            self._metrics.counts_problems.inc("malformed")
            return None, str(error)
        if counts is None:
            self._metrics.counts_problems.inc("missing")
            return None, "the prefill worker sent no counts"
        return counts, None
