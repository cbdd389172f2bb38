"""One request's life: prefill, handoff, choice, decode; and again elsewhere where a worker fails it."""

from __future__ import annotations

import asyncio

import msgspec

from coterie.core import Role, RouteRequest, prompt_hash
from coterie.decoding import UNREADABLE
from coterie.engines.base import Call, Engine
from coterie.errors import RequestError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.fleet.workers import Fleet
from coterie.gateway.legs.answers import pass_through
from coterie.gateway.legs.continuation import Continuations
from coterie.gateway.legs.decode import DecodeLeg
from coterie.gateway.legs.faults import Faults
from coterie.gateway.legs.handoffs import Handoffs
from coterie.gateway.legs.journey import DecisionLog, Journey, domain, session
from coterie.gateway.legs.prefill import PrefillLeg
from coterie.gateway.legs.retry import Budget, LegFailed, next_leg
from coterie.gateway.legs.turns import Turnstile
from coterie.gateway.legs.upstream import Patience, UpstreamError
from coterie.gateway.metrics import Metrics
from coterie.routing import PREFIX_BYTES, Reads


class Dispatcher:
    """Takes requests through prefill and decode.

    Attributes:
        decisions: the last decode decisions.
        handoffs: KV that waits between the legs.
        faults: takes note of what workers fail.
        running: requests on their way, with their tasks.
    """

    def __init__(self, engine: Engine, prefill: Fleet, decode: Fleet, config: GatewayConfig, metrics: Metrics) -> None:
        self.running: dict[Journey, asyncio.Task[None]] = {}
        self.faults = Faults(prefill, decode, metrics)
        self._turnstile = Turnstile()
        self.handoffs = Handoffs(engine, decode, self.faults, metrics, self._turnstile)
        self.decisions = DecisionLog(config.keep_decisions)
        self._prefill_leg = PrefillLeg(engine, prefill, self.handoffs, self.faults, metrics, self._turnstile)
        self._decode_leg = DecodeLeg(engine, decode, self.faults, metrics, self.decisions)
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._fleets: dict[Role, Fleet] = {"prefill": prefill, "decode": decode}
        self._metrics = metrics
        self._continuations = Continuations(engine, metrics)
        self._budget = Budget()
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next leg of a request on."""
        self._config = config
        self._prefill_leg.patience = Patience(config.prefill_timeout_s, config.idle_timeout_s)
        self._decode_leg.patience = Patience(config.first_byte_timeout_s, config.idle_timeout_s)
        self.handoffs.configure(config)
        self._continuations.configure(config)

    def expire(self, now_s: float) -> None:
        """End the requests that take longer than `--request-timeout-s`."""
        for journey, task in self.running.items():
            if now_s > journey.request.arrived_s + self._config.request_timeout_s and not journey.late:
                journey.late = True
                task.cancel()

    async def dispatch(self, journey: Journey) -> None:
        """Serve one request.  Being cancelled means that the client has left, or that the request's time is over.

        Raises:
            RequestError: the client's request is malformed.
            NoWorkerError: no worker of a role is available.
            UpstreamError: a worker could not be talked to; the reply may have begun.
            EngineError: a worker's reply makes no sense.
        """
        body, large = await self._turnstile.read_request(journey.request.body)
        call = self._engine.parse(journey.request.path, body, large)
        asked = self._describe(journey, call)
        if not call.prefill_only:
            self._fleets["decode"].require()
            self._note_path(journey, call)
        self._budget.pay()
        task = asyncio.current_task(self._loop)
        assert task is not None
        self.running[journey] = task
        left = False
        try:
            await self._serve(journey, call, asked)
        except asyncio.CancelledError:
            left = True
            if journey.late and task.uncancel() == 0:  # it was not the client who left
                limit_s = self._config.request_timeout_s
                raise UpstreamError(f"the request was not answered within {limit_s:g} s", "timeout") from None
            raise
        finally:
            del self.running[journey]
            self.handoffs.end(journey, left=left)
            self._turnstile.let_go(journey.request.body)

    async def _serve(self, journey: Journey, call: Call, asked: RouteRequest) -> None:
        """Leg by leg: a leg that fails says from which the request goes on, until one has answered the client."""
        self._continuations.follow(journey, call)
        leg: Role | None = self._first_leg(journey)
        while leg is not None:
            avoid = journey.tries.avoid[leg]
            try:
                if leg == "prefill":
                    to_decode = await self._prefill_leg.run(journey, call, asked, avoid)
                    leg = "decode" if to_decode else None
                else:
                    self.handoffs.check_age(journey)
                    await self._decode_leg.run(journey, call, asked, avoid)
                    leg = None
            except LegFailed as failure:
                if not journey.reply.status:
                    leg = self._after(journey, failure)
                elif (rest := self._go_on(journey, failure)) is not None:
                    call, asked, leg = rest, self._describe(journey, rest), self._first_leg(journey)
                else:
                    leg = None

    def _after(self, journey: Journey, failure: LegFailed) -> Role | None:
        """The leg from which the request goes on elsewhere; None if the worker's own answer was passed on.

        Raises:
            EngineError: there is nothing left to try, and no such answer.
        """
        journey.tries.note(failure)
        leg = next_leg(failure, split=journey.held is not None)
        if leg is None or not self._may_retry(journey, failure):
            if failure.answer is None:
                assert failure.error is not None
                raise failure.error
            pass_through(journey.reply, failure.answer, journey.id)
            return None
        self._metrics.retries.inc(failure.role, failure.reason)
        if leg == "prefill":
            self.handoffs.give_up(journey)
        return leg

    def _go_on(self, journey: Journey, failure: LegFailed) -> Call | None:
        """What is left of a stream of which the client has a part; None if it has all by now.

        Raises:
            EngineError: it does not go on.
        """
        journey.tries.note(failure)
        self.handoffs.end(journey, left=False)
        return self._continuations.go_on(journey, failure, lambda: self._hindrance(journey, failure.role))

    def _hindrance(self, journey: Journey, role: Role) -> str | None:
        """Why no other worker may be asked; None if one may, which counts as a retry."""
        avoid = journey.tries.avoid[role]
        if all(worker.name in avoid for worker in self._fleets[role].available()):
            return f"no other {role} worker is available"
        return None if self._budget.spend(len(self.running)) else "too many requests are being sent elsewhere"

    def _first_leg(self, journey: Journey) -> Role:
        return "prefill" if journey.not_split is None else "decode"

    def _may_retry(self, journey: Journey, failure: LegFailed) -> bool:
        available = [worker.name for worker in self._fleets[failure.role].available()]
        if not journey.tries.may_go_on(failure, available, self._config.retries):
            return False
        granted = self._budget.spend(len(self.running))
        if not granted:
            self._metrics.retries_refused.inc(failure.role)
        return granted

    def _note_path(self, journey: Journey, call: Call) -> None:
        """Whether a prefill worker is to compute the prompt, and if not, why."""
        most_bytes = self._config.split_above_bytes
        if call.undividable is not None:
            journey.not_split = call.undividable
        elif most_bytes is not None and call.prompt_bytes <= most_bytes:
            journey.not_split = "short prompt"
        if journey.not_split is not None:
            self._metrics.not_split.inc(journey.not_split)

    def _describe(self, journey: Journey, call: Call) -> RouteRequest:
        hashed = None
        if Reads.PROMPT_HASH in self._decode_leg.reads and call.prompt and not call.prompt_is_cut:
            hashed = _hash(call.prompt)
        limit = call.output_tokens
        return RouteRequest(
            id=journey.id,
            output_tokens=self._config.default_output_tokens if limit is None else limit,
            domain=domain(journey.request),
            prompt_hash=hashed,
            prefix=call.prompt[:PREFIX_BYTES],
            session=session(journey.request),
        )


def _hash(prompt: bytes) -> str:
    try:
        return prompt_hash(msgspec.json.decode(prompt))
    except UNREADABLE as error:
        raise RequestError(f"the prompt cannot be read: {error}") from None
