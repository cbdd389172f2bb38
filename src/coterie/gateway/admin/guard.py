"""Serves the admin side to those who may see it: by default those on this machine, elsewhere who shows its key."""

from __future__ import annotations

import contextlib
import os
import socket

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import read_admin_keys
from coterie.gateway.edge.http1 import error_body
from coterie.gateway.edge.keys import KeyRing
from coterie.gateway.edge.tls import server_context
from coterie.http_server import serving_app

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
    return serving_app(app if keys is None else guarded(app, keys), listener, grace_s=_GRACE_S, tls=tls)


def guarded(app: ASGIApp, keys: KeyRing) -> ASGIApp:
    """The same application, for those alone who show one of the keys."""
    refused = Response(
        error_body(
            "the admin side wants its key: send `Authorization: Bearer KEY`",
            "invalid_request_error",
            code="invalid_api_key",
        ),
        401,
        {"www-authenticate": "Bearer"},
        "application/json",
    )

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization", "").encode("latin-1")
        allowed = scope["path"] in OPEN_PATHS or keys.find(shown) is not None
        await (app if allowed else refused)(scope, receive, send)

    return guard
