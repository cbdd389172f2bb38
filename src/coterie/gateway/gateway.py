"""The gateway as one object: it takes each client's request to who can answer it, and keeps the record."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from coterie.clock import Clock, SystemClock
from coterie.engines.base import Engine
from coterie.errors import CoterieError, RequestError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import NO_ACCESS, Access
from coterie.gateway.edge.client import ClientConnection, ClientLimits, Clients
from coterie.gateway.edge.entrance import Entrance
from coterie.gateway.edge.reply import Reply
from coterie.gateway.edge.request import Request
from coterie.gateway.fleet.probe import Prober
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.legs.answers import answer_error, pass_through
from coterie.gateway.legs.dispatch import Dispatcher
from coterie.gateway.legs.journey import Journey, request_id, worker_headers
from coterie.gateway.legs.upstream import Collected, Patience
from coterie.gateway.metrics import Metrics
from coterie.gateway.processes.seat import Seat

SWEEP_S = 0.25
"""How often deadlines are looked at; a deadline is kept to within this."""

_MAX_MODELS_BYTES = 4 << 20
_log = logging.getLogger("coterie.gateway")
_requests_log = logging.getLogger("coterie.requests")


class Gateway:
    """Everything that one gateway process holds.

    Args:
        config: its configuration.
        engine: the dialect of its workers.
        clock: what its ledgers and policies read; by default the machine's.
        access: its secrets; by default none.
        seat: its place among the processes of the gateway; None where it is alone.

    Attributes:
        config: its configuration.
        engine: the dialect of its workers.
        prefill: prefill workers.
        decode: decode workers.
        metrics: its metrics.
        entrance: lets requests in.
        dispatcher: takes requests through prefill and decode.
        prober: asks workers whether they can do their part.
        clients: open client connections.
    """

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        clock: Clock | None = None,
        access: Access = NO_ACCESS,
        seat: Seat | None = None,
    ) -> None:
        clock = SystemClock() if clock is None else clock
        self.engine = engine
        self.prefill = Fleet("prefill", config.prefill, config, clock, access, seat)
        self.decode = Fleet("decode", config.decode, config, clock, access, seat)
        self.metrics = Metrics((self.prefill, self.decode))
        self.entrance = Entrance(config, access, self.metrics)
        self.dispatcher = Dispatcher(engine, self.prefill, self.decode, config, self.metrics)
        self._clients = Clients(ClientLimits(), self.metrics.refusals.inc)
        self.clients = self._clients.connections
        self.metrics.show("client_connections", "Connections of clients.", lambda: len(self.clients))
        self.metrics.show("body_bytes", "Bytes of the request bodies that are here.", lambda: self.body_bytes)
        self.prober = Prober(engine, config)
        self._loop = asyncio.get_running_loop()
        self._lines: list[bytes] = []
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from now on, but for who the workers are and how they are chosen."""
        self.config = config
        self._clients.limits = ClientLimits(
            connections=config.max_connections,
            body_bytes=config.max_body_bytes,
            held_bytes=config.max_held_bytes,
            request_s=config.client_request_timeout_s,
            idle_s=config.client_idle_timeout_s,
            stall_s=config.client_stall_timeout_s,
        )
        self.entrance.configure(config)
        self.dispatcher.configure(config)
        self.prober.configure(config)
        for fleet in (self.prefill, self.decode):
            fleet.configure(config)

    @property
    def body_bytes(self) -> int:
        """Bytes of the request bodies that are here."""
        return self._clients.held_bytes

    @property
    def ready(self) -> bool:
        """Whether a worker of each role is available."""
        return bool(self.prefill.available() and self.decode.available())

    @property
    def workers(self) -> list[Worker]:
        """All workers of both roles."""
        return [*self.prefill.workers.values(), *self.decode.workers.values()]

    def fleet_of(self, worker: Worker) -> Fleet:
        """The fleet that a worker belongs to."""
        return self.prefill if worker.role == "prefill" else self.decode

    def connect(self) -> ClientConnection:
        """A protocol for a new client connection."""
        return ClientConnection(self.handle, self.entrance.check, self._clients, self._loop)

    async def handle(self, request: Request, reply: Reply) -> None:
        """Answer one request."""
        path = request.path
        if path in self.engine.paths:
            if _allowed(request, reply, "POST"):
                await self._dispatch(request, reply)
        elif path in ("/health", self.engine.models_path):
            if _allowed(request, reply, "GET", "HEAD"):
                await (self._health(reply) if path == "/health" else self._models(request, reply))
        else:
            known = ", ".join(sorted({*self.engine.paths, self.engine.models_path, "/health"}))
            reply.send_error(404, f"unknown path; known are {known}", "not_found_error")

    async def finish(self, grace_s: float) -> None:
        """Take no further request, let running ones end for up to `grace_s` seconds, cut the rest."""
        self.entrance.gate.close()
        for client in list(self.clients):
            client.shut()
        await self._wait_for_clients(grace_s)
        for client in list(self.clients):
            client.abort()
        await self._wait_for_clients(1.0)  # those cut hand over what must be released
        if background := self.dispatcher.handoffs.background | self.prober.pairing:
            await asyncio.wait(background, timeout=self.config.connect_timeout_s)

    def stop(self) -> None:
        """Close what is left: the sweep and the idle connections to workers."""
        self._sweeper.cancel()
        self._log_requests()
        for worker in self.workers:
            worker.pool.close()

    async def _wait_for_clients(self, grace_s: float) -> None:
        end_s = self._loop.time() + grace_s
        while self.clients and self._loop.time() < end_s:  # noqa: ASYNC110  (only while stopping)
            await asyncio.sleep(0.02)

    async def _dispatch(self, request: Request, reply: Reply) -> None:
        try:
            id_ = request_id(request)
        except RequestError as error:
            reply.send_error(400, str(error), "invalid_request_error", param=error.param)
            return
        journey = Journey(id_, request, reply, self._worker_headers(request, id_))
        try:
            await self.entrance.admit(journey, self.dispatcher.dispatch)
        except CoterieError as error:
            answer_error(journey, error)
        except asyncio.CancelledError:
            journey.outcome = "left"
            self.metrics.disconnects.inc(journey.where)
            raise
        except Exception:
            _log.exception("request %s failed inside the gateway", id_)
            journey.outcome = "cut"
            raise
        finally:
            self._record(journey)

    def _worker_headers(self, request: Request, id_: str) -> bytes:
        return worker_headers(request, id_, authorization=self.entrance.access.passes_authorization)

    async def _health(self, reply: Reply) -> None:
        missing = [fleet.role for fleet in (self.prefill, self.decode) if not fleet.available()]
        if missing:
            reply.send_error(503, f"no {' and no '.join(missing)} worker is available", "unavailable_error")
        else:
            reply.send(200, [(b"content-type", b"application/json")], b'{"status":"ok"}')

    async def _models(self, request: Request, reply: Reply) -> None:
        workers = self.decode.available()
        if not workers:
            reply.send_error(503, "no decode worker is available", "unavailable_error", code="no_worker")
            return
        models = Collected(_MAX_MODELS_BYTES)
        patience = Patience(self.config.health_timeout_s, self.config.health_timeout_s)
        try:
            id_ = request_id(request)
            await workers[0].pool.get(request.target, self._worker_headers(request, id_), models, patience)
        except CoterieError as error:
            answer_error(Journey("", request, reply, b""), error)
            return
        pass_through(reply, models, id_)

    def _record(self, journey: Journey) -> None:
        first_byte_s, now_s = journey.first_byte_s, self._loop.time()
        metrics, arrived_s = self.metrics, journey.request.arrived_s
        metrics.requests.inc(journey.request.path, str(journey.reply.status))
        metrics.total_s.observe(now_s - arrived_s)
        if journey.prefill_s is not None:
            metrics.prefill_s.observe(journey.prefill_s)
        if journey.decode_start_s is not None:
            metrics.decode_s.observe(now_s - journey.decode_start_s)
        if first_byte_s is not None:
            metrics.first_byte_s.observe(first_byte_s - arrived_s)
        if self.config.log_requests:
            self._lines.append(_line(journey, now_s))

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)  # first: no fault below ends all waits' ends
        now_s = self._loop.time()
        for worker in self.workers:
            worker.pool.expire(now_s)
        for client in [client for client in self.clients if client.deadline < now_s]:
            client.expire()
        self.entrance.gate.expire(now_s)
        self.dispatcher.expire(now_s)
        self._log_requests()

    def _log_requests(self) -> None:
        """Log the requests that ended since the last time at once: one by one they would cost a tenth of the CPU."""
        if self._lines:
            _requests_log.info(b"\n".join(self._lines).decode())
            self._lines.clear()


def _allowed(request: Request, reply: Reply, *methods: str) -> bool:
    if request.method in methods:
        return True
    headers = [(b"allow", ", ".join(methods).encode())]
    reply.send_error(405, f"{request.path} takes {methods[0]} only", "invalid_request_error", headers)
    return False


def _line(journey: Journey, now_s: float) -> bytes:
    """The request as one line of JSON: names and numbers, no content."""
    decision, routed, arrived_s = journey.decision, journey.routed, journey.request.arrived_s
    first_byte_s = journey.first_byte_s
    return msgspec.json.encode(
        {
            "time": round(time.time(), 3),
            "id": journey.id,
            "key": journey.request.key.name if journey.request.key else "",
            "path": journey.request.path,
            "status": journey.reply.status,
            "outcome": journey.outcome,
            "prefill": journey.prefill,
            "decode": decision.worker if decision else "",
            "not_split": journey.not_split,
            "reason": decision.reason if decision else "",
            "detail": decision.detail if decision else "",
            "retries": [f"{failed.worker or failed.role}: {failed.reason}" for failed in journey.tries.failed],
            "continuations": journey.followed.times if journey.followed else 0,
            "prompt_tokens": routed.prompt_tokens if routed else 0,
            "ttft_s": None if first_byte_s is None else round(first_byte_s - arrived_s, 4),
            "total_s": round(now_s - arrived_s, 4),
        }
    )
