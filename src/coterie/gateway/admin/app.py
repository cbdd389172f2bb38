"""The admin side, on a port of its own: how the gateway is doing, and changes of it while it runs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coterie.errors import InputError
from coterie.gateway.admin import api
from coterie.gateway.admin.changes import Changes, NotServingError, UnknownWorkerError
from coterie.gateway.admin.openapi import Operation, document
from coterie.gateway.edge.http1 import error_body
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.legs.pool import split_url
from coterie.routing import Shown

MAX_BODY_BYTES = 64 << 10
_JSON = "application/json"
_log = logging.getLogger("coterie.gateway")


def admin_app(changes: Changes) -> Starlette:
    """The admin side as an ASGI application; its errors have the shape of the clients' side."""
    operations = _operations(_Admin(changes))
    described = msgspec.json.encode(document(operations))

    async def openapi(_: Request) -> Response:
        return Response(described, media_type=_JSON)

    by_path: dict[str, list[Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, []).append(operation)
    routes = [Route("/openapi.json", openapi), *(_route(path, ones) for path, ones in by_path.items())]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})


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
        return _json(api.Health("ok" if ready else "unavailable"), 200 if ready else 503)

    async def metrics(self, request: Request, body: None) -> Response:
        text = generate_latest(self._gateway.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def workers(self, request: Request, body: None) -> Response:
        fleets = (self._gateway.prefill, self._gateway.decode)
        return _json(api.Workers([self._row(fleet, worker) for fleet in fleets for worker in fleet.workers.values()]))

    async def decisions(self, request: Request, body: None) -> Response:
        return _json(api.Decisions(self._gateway.dispatcher.decisions.entries()))

    async def policies(self, request: Request, body: None) -> Response:
        return _json(api.Policies([_policy(fleet) for fleet in (self._gateway.prefill, self._gateway.decode)]))

    async def config(self, request: Request, body: None) -> Response:
        config = self._gateway.config
        effective = api.Effective(self._changes.generation, self._changes.changed_s)
        settings = {**dataclasses.asdict(config), "decode_policy": config.resolved_decode_policy}
        return _json({**msgspec.structs.asdict(effective), **settings})

    async def reload(self, request: Request, body: None) -> Response:
        return _json(await self._changes.reload())

    async def add(self, request: Request, body: api.NewWorker) -> Response:
        try:
            split_url(body.url)
        except InputError as error:
            raise HTTPException(400, str(error)) from None
        worker, new = await self._changes.add(body.role, body.url)
        return _json(self._row_of(worker), 201 if new else 200)

    async def remove(self, request: Request, body: None) -> Response:
        return _json(self._row_of(await self._changes.remove(request.path_params["name"])), 202)

    async def drain(self, request: Request, body: None) -> Response:
        return _json(self._row_of(self._changes.drain(request.path_params["name"])))

    async def undrain(self, request: Request, body: None) -> Response:
        return _json(self._row_of(self._changes.drain(request.path_params["name"], on=False)))

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


# --- requests and replies ----------------------------------------------------------------------------


def _route(path: str, operations: Sequence[Operation]) -> Route:
    """One for all methods of a path, so that another is answered with all that there are."""
    by_method = {operation.method: operation for operation in operations}

    async def endpoint(request: Request) -> Response:
        return await _answer(by_method["GET" if request.method == "HEAD" else request.method], request)

    return Route(path, endpoint, methods=list(by_method))


async def _answer(operation: Operation, request: Request) -> Response:
    body = None
    if operation.changes:
        _check_origin(request)
        body = _read(operation, request, await _bounded_body(request))
    try:
        return await operation.handler(request, body)
    except NotServingError as error:
        return _error(503, str(error), "unavailable_error", "starting")
    except UnknownWorkerError as error:
        return _error(404, str(error), "not_found_error", "unknown_worker")
    except InputError as error:
        return _error(409, str(error), "invalid_request_error", "refused")


def _check_origin(request: Request) -> None:
    """A page that somebody who can reach this port looks at must not change the gateway by posting to it."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HTTPException(403, f"requests of pages of another origin ({origin}) are not taken")


async def _bounded_body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes", {"connection": "close"})
    return b"".join(parts)


def _read(operation: Operation, request: Request, body: bytes) -> Any:
    if operation.body is None:
        if body:
            raise HTTPException(400, f"{operation.method} {operation.path} takes no body")
        return None
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise HTTPException(415, f"the body must be sent as content-type: {_JSON}")
    try:
        return msgspec.json.decode(body, type=operation.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body: {error}") from None


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _error(status: int, message: str, kind: str, code: str | None = None) -> Response:
    return Response(error_body(message, kind, code=code), status, media_type=_JSON)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = "unknown path; /openapi.json lists all" if error.status_code == 404 else error.detail
    reply = _error(error.status_code, message, kind)
    reply.headers.update(error.headers or {})
    return reply


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, "a fault inside the gateway; its log has the traceback", "internal_error")
