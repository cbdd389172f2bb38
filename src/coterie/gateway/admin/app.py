"""The admin side, on a port of its own: how the gateway is doing, and changes of it while it runs."""

from __future__ import annotations

import dataclasses

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coterie.errors import InputError
from coterie.gateway.admin import api
from coterie.gateway.admin.answering import HANDLERS, routes_of
from coterie.gateway.admin.changes import Changes
from coterie.gateway.admin.openapi import Operation, document
from coterie.gateway.admin.peers import peer_operations
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.peers.exchange import Exchange
from coterie.gateway.urls import split_url
from coterie.json_http import JSON, json_reply, metrics_reply
from coterie.routing import Shown


def admin_app(changes: Changes, exchange: Exchange | None = None) -> Starlette:
    """The admin side as an ASGI application.

    Args:
        changes: change the gateway.
        exchange: its part of the exchange with peers; None if it has none, or another process has it.
    """
    operations = (*_operations(_Admin(changes)), *peer_operations(exchange))
    described = msgspec.json.encode(document(operations))

    async def openapi(_: Request) -> Response:
        return Response(described, media_type=JSON)

    return Starlette(routes=[Route("/openapi.json", openapi), *routes_of(operations)], exception_handlers=HANDLERS)


def _operations(admin: _Admin) -> tuple[Operation, ...]:
    row = api.WorkerRow
    named = (404, 503)
    return (
        Operation("GET", "/health", "Whether clients can be served", admin.health, {200: api.Health, 503: api.Health}),
        Operation("GET", "/metrics", "Metrics for Prometheus", admin.metrics, {200: str}),
        Operation("GET", "/workers", "All workers", admin.workers, {200: api.Workers}),
        Operation("GET", "/decisions", "The last decode decisions", admin.decisions, {200: api.Decisions}),
        Operation("GET", "/policies", "How workers are chosen", admin.policies, {200: api.Policies}),
        Operation("GET", "/config", "All settings in effect", admin.config, {200: api.Effective}),
        Operation("POST", "/reload", "Read the configuration again", admin.reload, {200: api.Reloaded}, (409, 503)),
        Operation("POST", "/workers", "Add a worker", admin.add, {200: row, 201: row}, (409, 503), api.NewWorker),
        Operation("DELETE", "/workers/{name}", "Remove a worker", admin.remove, {202: row}, (*named, 409)),
        Operation("POST", "/workers/{name}/drain", "Send a worker nothing more", admin.drain, {200: row}, named),
        Operation("POST", "/workers/{name}/undrain", "Use a drained worker again", admin.undrain, {200: row}, named),
    )


class _Admin:
    """The handlers."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._gateway = changes.gateway

    async def health(self, request: Request, body: None) -> Response:
        ready = self._gateway.ready
        return json_reply(api.Health("ok" if ready else "unavailable"), 200 if ready else 503)

    async def metrics(self, request: Request, body: None) -> Response:
        text = generate_latest(self._gateway.metrics.registry)
        return metrics_reply(text)

    async def workers(self, request: Request, body: None) -> Response:
        fleets = (self._gateway.prefill, self._gateway.decode)
        return json_reply(
            api.Workers([self._row(fleet, worker) for fleet in fleets for worker in fleet.workers.values()])
        )

    async def decisions(self, request: Request, body: None) -> Response:
        return json_reply(api.Decisions(self._gateway.dispatcher.decisions.entries()))

    async def policies(self, request: Request, body: None) -> Response:
        return json_reply(api.Policies([_policy(fleet) for fleet in (self._gateway.prefill, self._gateway.decode)]))

    async def config(self, request: Request, body: None) -> Response:
        config = self._gateway.config
        urls = {**self._gateway.prefill.urls, **self._gateway.decode.urls}
        drained = [worker.name for worker in self._gateway.workers if "draining" in worker.problems]
        effective = api.Effective(self._changes.generation, self._changes.changed_s, urls, drained)
        settings = {**dataclasses.asdict(config), "decode_policy": config.resolved_decode_policy}
        return json_reply({**msgspec.structs.asdict(effective), **settings})

    async def reload(self, request: Request, body: None) -> Response:
        return json_reply(await self._changes.reload())

    async def add(self, request: Request, body: api.NewWorker) -> Response:
        try:
            split_url(body.url)
        except InputError as error:
            raise HTTPException(400, str(error)) from None
        worker, new = await self._changes.add(body.role, body.url)
        return json_reply(self._row_of(worker), 201 if new else 200)

    async def remove(self, request: Request, body: None) -> Response:
        return json_reply(self._row_of(await self._changes.remove(request.path_params["name"])), 202)

    async def drain(self, request: Request, body: None) -> Response:
        return json_reply(self._row_of(self._changes.drain(request.path_params["name"])))

    async def undrain(self, request: Request, body: None) -> Response:
        return json_reply(self._row_of(self._changes.drain(request.path_params["name"], on=False)))

    def _row_of(self, worker: Worker) -> api.WorkerRow:
        return self._row(self._gateway.fleet_of(worker), worker)

    def _row(self, fleet: Fleet, worker: Worker) -> api.WorkerRow:
        state = next(state for state in fleet.ledger.states() if state.name == worker.name)
        return api.WorkerRow(
            name=worker.name,
            role=worker.role,
            url=worker.url,
            state=self._state(fleet, worker),
            available=state.available,
            problem=worker.problem,
            breaker=worker.breaker.state,
            requests=state.requests,
            tokens=state.tokens,
            transfer=worker.transfer if worker.role == "decode" else None,
            reading=state.reading,
            connections=len(worker.pool.connections),
        )

    def _state(self, fleet: Fleet, worker: Worker) -> api.State:
        if worker not in fleet.targets:
            return "leaving"
        if "draining" in worker.problems:
            return "draining" if self._changes.busy(worker) else "drained"
        return "unavailable" if worker.problems else "available"


def _policy(fleet: Fleet) -> api.PolicyRow:
    policy = fleet.policy
    figures: dict[str, float] = policy.figures(fleet.clock.now()) if isinstance(policy, Shown) else {}
    return api.PolicyRow(fleet.role, None if policy is None else policy.name, figures)
