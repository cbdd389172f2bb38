"""The monitor's HTTP side; `messages` lists it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from coterie.errors import InputError
from coterie.experts.membership import Accepted, Action, Heartbeat, Leave, Refused, Register, Report
from coterie.experts.monitor.messages import MAX_BODY_BYTES, Problem, Pulse, Welcome
from coterie.experts.monitor.metrics import MonitorMetrics
from coterie.experts.monitor.monitor import MAX_FOLLOWERS, Monitor
from coterie.experts.monitor.status import status

_JSON = "application/json"
_LINES = "application/x-ndjson"
_T = TypeVar("_T")


def app(monitor: Monitor) -> Starlette:
    """The monitor as an ASGI application."""
    handlers = _Handlers(monitor)
    return Starlette(
        routes=[
            Route("/register", handlers.register, methods=["POST"]),
            Route("/heartbeat", handlers.heartbeat, methods=["POST"]),
            Route("/leave", handlers.leave, methods=["POST"]),
            Route("/report", handlers.report, methods=["POST"]),
            Route("/members", handlers.members),
            Route("/status", handlers.status),
            Route("/placement", handlers.placement),
            Route("/metrics", handlers.metrics),
            Route("/health", handlers.health),
        ],
        exception_handlers={HTTPException: _refused, InputError: _unusable},
    )


class _Handlers:
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._metrics = CollectorRegistry()
        self._metrics.register(MonitorMetrics(monitor))

    async def register(self, request: Request) -> Response:
        return self._answer(self._monitor.hear(await _read(request, Register)))

    async def heartbeat(self, request: Request) -> Response:
        pulse = await _read(request, Pulse)
        action = self._monitor.hear(Heartbeat(pulse.id, pulse.phase))
        if pulse.load is not None and isinstance(action, Accepted):
            self._monitor.weigh(pulse.id, pulse.load)
        return self._answer(action)

    async def leave(self, request: Request) -> Response:
        return self._answer(self._monitor.hear(await _read(request, Leave)))

    async def report(self, request: Request) -> Response:
        return self._answer(self._monitor.hear(await _read(request, Report)))

    async def members(self, request: Request) -> Response:
        if self._monitor.followers >= MAX_FOLLOWERS:
            raise HTTPException(503, f"{MAX_FOLLOWERS} clients follow already")
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) < 20):
            raise HTTPException(400, f"after={after[:40]}: must be an epoch")
        lines = self._monitor.follow(request.query_params.get("run", ""), int(after))
        return StreamingResponse(lines, media_type=_LINES)

    async def status(self, request: Request) -> Response:
        return _json(status(self._monitor))

    async def placement(self, request: Request) -> Response:
        return _json(self._monitor.suggestion())

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics), headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    def _answer(self, action: Action | None) -> Response:
        if isinstance(action, Accepted):
            heartbeat_s = self._monitor.membership.timing.heartbeat_s
            return _json(Welcome(action.epoch, action.since, action.needed, heartbeat_s))
        if isinstance(action, Refused):
            return _json(Problem(action.reason), 409)
        return _json(Problem("there is no such server; register"), 404)


async def _read(request: Request, type_: type[_T]) -> _T:
    """The body; a page that somebody looks at can post to this port, but not JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise HTTPException(415, f"the body must be sent as content-type: {_JSON}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes", {"connection": "close"})
    try:
        return msgspec.json.decode(bytes(body), type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body: {error}") from None


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type=_JSON)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = _json(Problem(error.detail), error.status_code)
    reply.headers.update(error.headers or {})
    return reply


async def _unusable(_: Request, error: Exception) -> Response:
    return _json(Problem(str(error)), 409)
