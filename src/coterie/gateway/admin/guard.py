"""Serves the admin side to those who may see it: by default those on this machine, elsewhere who shows its key."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import read_admin_keys
from coterie.gateway.edge.http1 import error_body
from coterie.gateway.edge.keys import KeyRing
from coterie.gateway.edge.tls import server_context
from coterie.http_server import serving_app
from coterie.json_http import JSON

OPEN_PATHS = frozenset({"/health"})
"""Those whom an orchestrator asks, which has no key."""

_GRACE_S = 1


def serving_admin(
    app: ASGIApp, config: GatewayConfig, listener: socket.socket
) -> contextlib.AbstractAsyncContextManager[None]:
    """Serve the admin side as long as the block lasts.

    Raises:
        ConfigError: its key or certificate cannot be read.
    """
    keys = read_admin_keys(config, os.environ)
    tls = server_context(config.tls_cert, config.tls_key) if config.admin_tls and config.tls_cert else None
    guard = by_address(app) if keys is None else guarded(app, keys)
    return serving_app(guard, listener, grace_s=_GRACE_S, tls=tls)


def by_address(app: ASGIApp) -> ASGIApp:
    """The same application, for those alone who ask for it by an IP address, or as localhost.

    A page of another site can have its own name stand for 127.0.0.1: to a browser on this machine, the admin side is
    then of that page's origin (DNS rebinding).  The name that was asked for is what gives it away.
    """
    refused = _refusal(
        403,
        "without a key, the admin side is asked for as 127.0.0.1 or localhost; for another name give it a key, with "
        "--admin-key-env",
        "unknown_host",
    )

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["path"] in OPEN_PATHS or _is_address(Headers(scope=scope).get("host", "localhost"))
        await (app if allowed else refused)(scope, receive, send)

    return guard


def _is_address(authority: str) -> bool:
    name = authority.rpartition("]")[0].removeprefix("[") or authority.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


def guarded(app: ASGIApp, keys: KeyRing) -> ASGIApp:
    """The same application, for those alone who show one of the keys."""
    refused = _refusal(
        401,
        "the admin side wants its key: send `Authorization: Bearer KEY`",
        "invalid_api_key",
        {"www-authenticate": "Bearer"},
    )

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization", "").encode("latin-1")
        allowed = scope["path"] in OPEN_PATHS or keys.find(shown) is not None
        await (app if allowed else refused)(scope, receive, send)

    return guard


def _refusal(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_body(message, "invalid_request_error", code=code), status, headers, JSON)
