"""How operations of the admin side are answered over HTTP; their errors have the shape of the clients' side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coterie.errors import InputError, UnsupportedError, WireError
from coterie.gateway.admin.changes import NotServingError, UnknownWorkerError
from coterie.gateway.admin.openapi import Operation
from coterie.gateway.edge.http1 import error_body
from coterie.json_http import JSON, bounded_body, check_media


def routes_of(operations: Sequence[Operation]) -> list[Route]:
    """What answers these operations."""
    by_path: dict[str, list[Operation]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, []).append(operation)
    return [_route(path, ones) for path, ones in by_path.items()]


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
        body = _read(operation, request, await bounded_body(request, operation.max_bytes))
    try:
        return await operation.handler(request, body)
    except NotServingError as error:
        return error_reply(503, str(error), "unavailable_error", "starting")
    except UnknownWorkerError as error:
        return error_reply(404, str(error), "not_found_error", "unknown_worker")
    except (InputError, UnsupportedError) as error:
        return error_reply(409, str(error), "invalid_request_error", "refused")


def _check_origin(request: Request) -> None:
    """A page that somebody who can reach this port looks at must not change the gateway by posting to it."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HTTPException(403, f"requests of pages of another origin ({origin}) are not taken")


def _read(operation: Operation, request: Request, body: bytes) -> Any:
    if operation.body is None:
        if body:
            raise HTTPException(400, f"{operation.method} {operation.path} takes no body")
        return None
    check_media(request, operation.media)
    try:
        return operation.decode(body)
    except WireError as error:
        raise HTTPException(400, str(error)) from None


def error_reply(status: int, message: str, kind: str, code: str | None = None) -> Response:
    """An error, in the shape of clients' errors."""
    return Response(error_body(message, kind, code=code), status, media_type=JSON)


async def refused(request: Request, error: Exception) -> Response:
    """Answer a request that no operation answers."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = "unknown path; /openapi.json lists all" if error.status_code == 404 else error.detail
    reply = error_reply(error.status_code, message, kind)
    reply.headers.update(error.headers or {})
    return reply


async def failed(request: Request, error: Exception) -> Response:
    """Answer a request that met a fault."""
    return error_reply(500, "a fault inside the gateway; its log has the traceback", "internal_error")


HANDLERS = {HTTPException: refused, Exception: failed}
"""How an application that answers operations answers everything else."""
