"""Streams whose worker is lost after the client has got a part of them, and that go on at others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coterie.engines.base import Call, Engine, Transcript
from coterie.errors import CoterieError, EngineError, UnresumableError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.legs.answers import identity
from coterie.gateway.legs.events import EventRelay
from coterie.gateway.legs.journey import Journey
from coterie.gateway.legs.retry import LegFailed
from coterie.gateway.legs.stream import Pace, Relay
from coterie.gateway.legs.upstream import UpstreamError
from coterie.gateway.metrics import Metrics

_MOST_BYTES_A_TOKEN = 8
"""Prompts of more bytes than that are taken to have more tokens than are kept, and are not even asked for them."""


@dataclass(slots=True, eq=False)
class Followed:
    """A stream that could go on at another worker.

    Attributes:
        transcript: what of it has come.
        times: how often it has gone on.
        first_byte_s: when its first byte was relayed, on the loop's clock, once its first worker is lost; None before.
    """

    transcript: Transcript
    times: int = 0
    first_byte_s: float | None = None


class Continuations:
    """Follows streams, and has those go on whose worker is lost."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next request, or loss, on."""
        self._config = config

    def follow(self, journey: Journey, call: Call) -> None:
        """Keep a transcript of the request's stream, if another worker could go on with it."""
        if not self._config.continue_streams or not call.stream or call.prefill_only:
            return
        most = self._config.continue_max_tokens
        journey.unresumable = self._engine.why_unresumable(call, sampled=self._config.continue_sampled)
        if journey.unresumable is None and call.prompt_bytes > _MOST_BYTES_A_TOKEN * most:
            journey.unresumable = f"its prompt has over {most} tokens"
        if journey.unresumable is None:
            journey.followed = Followed(self._engine.transcript(call, most))

    def go_on(self, journey: Journey, failure: LegFailed, hindrance: Callable[[], str | None]) -> Call | None:
        """What is left of a stream that the client has got a part of.

        Args:
            journey: the request.
            failure: of one of its workers.
            hindrance: asked once for why no other worker may be asked; None if one may.

        Returns:
            The request for other workers; None if only the end of the stream was missing, which has been sent.

        Raises:
            EngineError: the stream cannot go on; the message says why.
        """
        followed, relay = journey.followed, journey.relay
        if followed is None or not isinstance(relay, EventRelay) or not relay.streams:
            raise self._refused(failure, journey.unresumable)
        if followed.transcript.complete:
            relay.close(followed.transcript.closing())
            self._metrics.continuations.inc("closed")
            return None
        if followed.times >= self._config.continuations:
            raise self._refused(failure, f"it has gone on {followed.times} times already")
        try:
            call = followed.transcript.resume()
        except UnresumableError as error:
            raise self._refused(failure, str(error)) from None
        if (why := hindrance()) is not None:
            raise self._refused(failure, why)
        followed.times += 1
        if followed.first_byte_s is None:
            followed.first_byte_s = relay.first_byte_s
        journey.relay = relay_for(journey, self._loop, None)  # through which the client is told if there is no worker
        self._metrics.continuations.inc("resumed")
        return call

    def _refused(self, failure: LegFailed, why: str | None) -> CoterieError:
        error = failure.error
        if error is None:
            assert failure.answer is not None
            error = EngineError(f"{failure.role} worker {failure.worker} answered with {failure.answer.status}")
        if why is None:
            return error
        self._metrics.continuations.inc("refused")
        message = f"{error}; the stream does not go on: {why}"
        return UpstreamError(message, error.kind) if isinstance(error, UpstreamError) else EngineError(message)


def relay_for(journey: Journey, loop: asyncio.AbstractEventLoop, pace: Pace | None) -> Relay:
    """A relay for the request's next decode worker."""
    headers, followed = identity(journey.id), journey.followed
    if followed is None:
        return Relay(journey.reply, headers, loop, pace)
    return EventRelay(journey.reply, headers, loop, pace, followed.transcript, begun=followed.first_byte_s is not None)
