"""One request's life: prefill, handoff, choice, decode."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from coterie.core import ExpertCounts, RouteRequest, prompt_hash
from coterie.engines.base import Call, Engine, Handoff, Prefilled
from coterie.errors import CoterieError, EngineError, NoWorkerError, RequestError, WireError
from coterie.gateway.client import Reply
from coterie.gateway.config import GatewayConfig
from coterie.gateway.http1 import HOP_BY_HOP, Header, RefusedError, end_to_end
from coterie.gateway.journey import REQUEST_ID, DecisionLog, Journey, domain, session
from coterie.gateway.metrics import Metrics
from coterie.gateway.stream import Pace, Relay
from coterie.gateway.upstream import Collected, Patience, UpstreamError
from coterie.gateway.workers import Fleet, Worker
from coterie.routing import PREFIX_BYTES, Reads

MAX_PREFILL_REPLY_BYTES = 64 << 20

_log = logging.getLogger("coterie.gateway")
_replaced = HOP_BY_HOP | {b"content-length", REQUEST_ID}
_rewritten = _replaced | {b"content-type"}


class Dispatcher:
    """Takes requests through prefill and decode.

    Attributes:
        decisions: the last decode decisions.
        background: releases of handoffs under way.
    """

    def __init__(self, engine: Engine, prefill: Fleet, decode: Fleet, config: GatewayConfig, metrics: Metrics) -> None:
        self.decisions = DecisionLog(config.keep_decisions)
        self.background: set[asyncio.Task[None]] = set()
        self._engine = engine
        self._prefill = prefill
        self._decode = decode
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next leg of a request on."""
        self._config = config
        self._prefill_patience = Patience(config.prefill_timeout_s, config.idle_timeout_s)
        self._decode_patience = Patience(config.first_byte_timeout_s, config.idle_timeout_s)

    async def dispatch(self, journey: Journey) -> None:
        """Serve one request.  Being cancelled means that the client has left.

        Raises:
            RequestError: the client's request is malformed.
            NoWorkerError: no worker of a role is available.
            UpstreamError: a worker could not be talked to; the reply may have begun.
            EngineError: a worker's reply makes no sense.
        """
        call = self._engine.parse(journey.request.path, journey.request.body)
        asked = self._describe(journey, call)
        if call.prefill_only:
            await self._run_prefill_only(journey, call, asked)
            return
        if not self._decode.available():
            raise NoWorkerError("no decode worker is available")
        handoff = None
        journey.not_split = self._why_not_split(call)
        if journey.not_split is None:
            prefilled = await self._run_prefill(journey, call, asked)
            if prefilled is None:
                return
            handoff = prefilled.handoff
        if journey.not_split is not None:
            self._metrics.not_split.inc(journey.not_split)
        journey.window = "handoff"
        left = False
        try:
            await self._run_decode(journey, call, self._with_counts(journey, asked, handoff), handoff)
        except asyncio.CancelledError:
            left = True
            raise
        finally:
            if handoff is not None and not _taken(journey.relay, left=left):
                self._release(journey, call, handoff)

    # --- the prefill leg ---

    def _describe(self, journey: Journey, call: Call) -> RouteRequest:
        hashed = None
        if Reads.PROMPT_HASH in self._reads() and call.prompt:
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

    def _why_not_split(self, call: Call) -> str | None:
        """Why the decode worker is to compute the prompt, too; None if a prefill worker is."""
        if call.undividable is not None:
            return call.undividable
        most_bytes = self._config.split_above_bytes
        return "short prompt" if most_bytes is not None and len(call.prompt) <= most_bytes else None

    async def _run_prefill_only(self, journey: Journey, call: Call, asked: RouteRequest) -> None:
        """Have a prefill worker answer by itself: it has the only token when the prompt is done, and keeps no KV."""
        relay = journey.relay = Relay(journey.reply, _identity(journey.id), self._loop)
        await self._post_prefill(journey, self._engine.decode_body(call, None), relay, asked)
        self._metrics.answered_by_prefill.inc("one token")

    async def _run_prefill(self, journey: Journey, call: Call, asked: RouteRequest) -> Prefilled | None:
        """What a prefill worker made of the prompt; None if the client has its answer by now."""
        reply = Collected(MAX_PREFILL_REPLY_BYTES, wanted_late=True)
        try:
            await self._post_prefill(journey, self._engine.prefill_body(call), reply, asked)
        except asyncio.CancelledError:
            self._release_late(journey, call, reply)
            raise
        if reply.status != 200:
            pass_through(journey.reply, reply, journey.id)
            return None
        prefilled = self._read_prefilled(journey, reply)
        if prefilled.ended:
            self._answer_with_prefill(journey, call, reply, prefilled.handoff)
            return None
        if prefilled.handoff is None:
            journey.not_split = "no handoff"
        return prefilled

    async def _post_prefill(self, journey: Journey, body: bytes, reply: Collected | Relay, asked: RouteRequest) -> None:
        worker, decision = self._prefill.choose(asked)
        journey.prefill = worker.name
        self._metrics.decided("prefill", decision)
        start_s = self._loop.time()
        with self._prefill.ledger.lease(worker.name, asked):
            try:
                await worker.pool.post(journey.request.target, journey.headers, body, reply, self._prefill_patience)
            except UpstreamError as error:
                self._lost(worker, error)
                raise
        journey.prefill_s = self._loop.time() - start_s

    def _answer_with_prefill(self, journey: Journey, call: Call, reply: Collected, handoff: Handoff | None) -> None:
        """The first token ended the output: a decode worker would only compute it again."""
        if handoff is not None:
            self._release(journey, call, handoff)
        assert reply.head is not None
        answer = self._engine.answer(call, reply.body())
        headers = [(b"content-type", answer.content_type), *end_to_end(reply.head.headers, _rewritten)]
        journey.reply.send(200, [*headers, *_identity(journey.id)], answer.body)
        self._metrics.answered_by_prefill.inc("ended")

    def _release_late(self, journey: Journey, call: Call, reply: Collected) -> None:
        """The client has left; the reply may be here all the same, or be on its way, and names KV that waits."""

        def release() -> None:
            with contextlib.suppress(EngineError):  # such a reply names none
                if reply.status == 200:
                    self._release(journey, call, self._engine.handoff(reply.body()))

        if reply.complete:
            release()
        else:
            reply.on_complete = release

    def _read_prefilled(self, journey: Journey, reply: Collected) -> Prefilled:
        try:
            return self._engine.prefilled(reply.body())
        except EngineError as error:
            raise EngineError(f"prefill worker {journey.prefill}: {error}") from None

    # --- the choice ---

    def _reads(self) -> frozenset[Reads]:
        assert self._decode.policy is not None
        return self._decode.policy.reads

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
        if Reads.COUNTS not in self._reads():
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

    # --- the decode leg ---

    async def _run_decode(self, journey: Journey, call: Call, routed: RouteRequest, handoff: Handoff | None) -> None:
        worker, decision = self._decode.choose(routed)
        journey.decision, journey.routed = decision, routed
        self._metrics.decided("decode", decision)
        self.decisions.add(journey, routed, decision)
        body = self._engine.decode_body(call, handoff)
        pace = Pace(self._decode.clock) if self._decode.ledger.followed else None
        relay = journey.relay = Relay(journey.reply, _identity(journey.id), self._loop, pace)
        journey.window = "decode"
        journey.decode_start_s = self._loop.time()
        with self._decode.ledger.lease(worker.name, routed) as lease:
            try:
                await worker.pool.post(journey.request.target, journey.headers, body, relay, self._decode_patience)
            except UpstreamError as error:
                self._lost(worker, error)
                raise
            lease.release(relay.served())

    def _lost(self, worker: Worker, error: UpstreamError) -> None:
        self._metrics.errors.inc(worker.name, error.kind)
        _log.warning("%s (%s)", error, worker.url)

    # --- handoffs that nobody will decode ---

    def _release(self, journey: Journey, call: Call, handoff: Handoff) -> None:
        tried = journey.decision.worker if journey.decision else None
        task = self._loop.create_task(self._release_now(journey.headers, call, handoff, tried))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _release_now(self, headers: bytes, call: Call, handoff: Handoff, tried: str | None) -> None:
        """Free a handoff by having a decode worker collect it; where that fails, the engine's own lease ends it."""
        workers = self._decode.available()
        if not workers:
            self._metrics.released.inc("no worker")
            return
        worker = next((worker for worker in workers if worker.name != tried), workers[0])
        reply = Collected(MAX_PREFILL_REPLY_BYTES)
        body = self._engine.release_body(call, handoff)
        try:
            await worker.pool.post(call.path.encode(), headers, body, reply, self._decode_patience)
        except UpstreamError as error:
            self._lost(worker, error)
            self._metrics.released.inc("failed")
            return
        self._metrics.released.inc("released" if reply.status < 500 else "failed")


def _hash(prompt: bytes) -> str:
    try:
        return prompt_hash(msgspec.json.decode(prompt))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the prompt cannot be read: {error}") from None


def _identity(id_: str) -> list[Header]:
    return [(REQUEST_ID, id_.encode("ascii"))]


def pass_through(reply: Reply, collected: Collected, id_: str) -> None:
    """Answer with a worker's own error: status, headers and body."""
    assert collected.head is not None
    headers = end_to_end(collected.head.headers, _replaced)
    reply.send(collected.status, [*headers, *_identity(id_)], collected.body())


def _taken(relay: Relay | None, *, left: bool) -> bool:
    """Whether the decode leg has disposed of the handoff.

    A decode server that answers 200 has taken it, and so has one whose request was cancelled after it was sent.
    One that could not be reached, failed, or refused the request has not: vLLM tells the prefill server of some
    refusals and not of others.  A release too many costs an error that no client sees.
    """
    if relay is None or not relay.sent:
        return False
    return left or (relay.head is not None and relay.head.status < 400)


def answer_error(journey: Journey, error: CoterieError) -> None:
    """Tell the client what went wrong, as far as the reply still can."""
    if journey.reply.status:
        assert journey.relay is not None
        journey.outcome = "error" if journey.relay.fail(str(error)) else "cut"
        return
    journey.outcome = "error"
    reply, headers = journey.reply, _identity(journey.id)
    if isinstance(error, RefusedError):
        reply.refuse(error, headers)
    elif isinstance(error, RequestError):
        reply.send_error(400, str(error), "invalid_request_error", headers, param=error.param)
    elif isinstance(error, NoWorkerError):
        reply.send_error(503, str(error), "unavailable_error", headers, code="no_worker")
    elif isinstance(error, UpstreamError) and error.kind == "timeout":
        reply.send_error(504, str(error), "upstream_error", headers, code="timeout")
    else:
        reply.send_error(502, str(error), "upstream_error", headers, code="bad_gateway")
