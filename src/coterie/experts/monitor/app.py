"""The monitor's HTTP side; `messages` lists it."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from coterie.decoding import reading
from coterie.errors import InputError, WireError
from coterie.experts.membership import Accepted, Action, Heartbeat, Leave, Refused, Register, Report
from coterie.experts.monitor.messages import MAX_BODY_BYTES, Problem, Pulse, Welcome
from coterie.experts.monitor.metrics import MonitorMetrics
from coterie.experts.monitor.monitor import MAX_FOLLOWERS, Monitor
from coterie.experts.monitor.status import status
from coterie.json_http import bounded_body, check_media, json_reply, metrics_reply

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
        return json_reply(status(self._monitor))

    async def placement(self, request: Request) -> Response:
        return json_reply(self._monitor.suggestion())

    async def metrics(self, request: Request) -> Response:
        return metrics_reply(generate_latest(self._metrics))

    async def health(self, request: Request) -> Response:
        return json_reply({"status": "ok"})

    def _answer(self, action: Action | None) -> Response:
        if isinstance(action, Accepted):
            heartbeat_s = self._monitor.membership.timing.heartbeat_s
            return json_reply(Welcome(action.epoch, action.since, action.needed, heartbeat_s))
        if isinstance(action, Refused):
            return json_reply(Problem(action.reason), 409)
        return json_reply(Problem("there is no such server; register"), 404)


async def _read(request: Request, type_: type[_T]) -> _T:
    """The body; a page that somebody looks at can post to this port, but not JSON."""
    check_media(request)
    body = await bounded_body(request, MAX_BODY_BYTES)
    try:
        with reading("the body"):
            return msgspec.json.decode(body, type=type_)
    except WireError as error:
        raise HTTPException(400, str(error)) from None


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = json_reply(Problem(error.detail), error.status_code)
    reply.headers.update(error.headers or {})
    return reply


async def _unusable(_: Request, error: Exception) -> Response:
    return json_reply(Problem(str(error)), 409)
