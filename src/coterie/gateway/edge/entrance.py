"""What a request passes before it is dispatched: its key, the key's limits, and the queue."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import Access
from coterie.gateway.edge.admission import Admission, Gate, Ticket
from coterie.gateway.edge.http1 import RefusedError, retry_after
from coterie.gateway.edge.keys import Key
from coterie.gateway.edge.meter import MeteredReply
from coterie.gateway.edge.quota import Excess, Quota
from coterie.gateway.edge.request import Request
from coterie.gateway.legs.journey import Journey
from coterie.gateway.metrics import Metrics

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key: a load balancer has none, and nothing is told there."""

Dispatch = Callable[[Journey], Awaitable[None]]


class Entrance:
    """Lets requests in, and knows who is inside.

    Args:
        config: the bounds.
        access: the keys.
        metrics: where refusals and waits are counted.

    Attributes:
        gate: where requests wait, if there is a bound on those in flight.
    """

    def __init__(self, config: GatewayConfig, access: Access, metrics: Metrics) -> None:
        self._access = access
        self.gate = Gate(Admission(math.inf, 0), math.inf)
        metrics.show("queue_length", "Requests that wait for their turn.", lambda: self.gate.admission.waiting)
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._quotas: dict[Key, Quota] = {}
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next request on."""
        self._bounded = config.max_in_flight > 0
        self.gate.resize(config.max_in_flight or math.inf, config.max_queue, config.queue_timeout_s)

    @property
    def access(self) -> Access:
        """The keys.  They may be replaced at any time; those that stay as they are keep count."""
        return self._access

    @access.setter
    def access(self, access: Access) -> None:
        self._access = access
        self._quotas = {key: quota for key, quota in self._quotas.items() if access.keys and key in access.keys}

    def check(self, request: Request) -> None:
        """Look for the key in a request's head, before its body is read.

        Raises:
            RefusedError: it shows none that is known.
        """
        keys = self._access.keys
        if keys is None or request.path in OPEN_PATHS:
            return
        shown = request.header(b"authorization")
        request.key = keys.find(shown)
        if request.key is None:
            raise _unauthorized(shown)

    async def admit(self, journey: Journey, dispatch: Dispatch) -> None:
        """Have a request dispatched when its turn comes.

        Raises:
            RefusedError: it is more than its key may ask for, or too many wait.
            CoterieError: whatever `dispatch` raises.
        """
        key = journey.request.key
        if key is not None and key.limited:
            await self._within_quota(journey, key, dispatch)
        else:
            await self._in_turn(journey, dispatch)

    async def _within_quota(self, journey: Journey, key: Key, dispatch: Dispatch) -> None:
        quota = self._quotas.get(key)
        if quota is None:
            quota = self._quotas[key] = Quota(key, self._loop.time())
        excess = quota.enter(self._loop.time())
        if excess is not None:
            self._metrics.refusals.inc(excess.limit)
            raise _beyond(key, excess)
        if key.tokens_per_minute is not None:
            journey.reply = MeteredReply(journey.reply)
        try:
            await self._in_turn(journey, dispatch)
        finally:
            quota.leave(_tokens(journey), self._loop.time())

    async def _in_turn(self, journey: Journey, dispatch: Dispatch) -> None:
        if not self._bounded:
            await dispatch(journey)
            return
        ticket = await self._wait(journey)
        try:
            await dispatch(journey)
        finally:
            self.gate.leave(ticket)

    async def _wait(self, journey: Journey) -> Ticket:
        tenant = journey.reply.connection.peer if journey.request.key is None else journey.request.key.name
        journey.window, since_s = "queue", self._loop.time()
        try:
            ticket = await self.gate.enter(tenant)
        except RefusedError as refused:
            self._metrics.refusals.inc(refused.reason)
            raise
        journey.window = "prefill"
        self._metrics.queue_s.observe(self._loop.time() - since_s)
        return ticket


def _tokens(journey: Journey) -> int:
    if not isinstance(journey.reply, MeteredReply):
        return 0
    return journey.reply.tokens(journey.routed.prompt_tokens if journey.routed else 0)


def _unauthorized(shown: bytes | None) -> RefusedError:
    problem = "no API key is shown" if shown is None else "the API key is not known"
    return RefusedError(
        401,
        f"{problem}: send `Authorization: Bearer KEY`",
        code="invalid_api_key",
        headers=[(b"www-authenticate", b"Bearer")],
    )


def _beyond(key: Key, excess: Excess) -> RefusedError:
    return RefusedError(
        429,
        f"key {key.name} may have {excess.limit} {excess.value}; ask again in {excess.retry_after_s:.3g} s",
        "tokens" if excess.limit == "tokens_per_minute" else "requests",
        code="rate_limit_exceeded",
        headers=[retry_after(excess.retry_after_s)],
    )
