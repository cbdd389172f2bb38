"""Serves an ASGI application in the caller's event loop: uvicorn, but for its signals and its timers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from coterie.errors import ConfigError

BACKLOG = 4096
"""Connections that may wait to be accepted."""


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args:
        host: address of either family.
        port: of it.
        flag: what the user would change, for the error.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --{flag}") from None


def url_of(listener: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving_app(app: ASGIApp, listener: socket.socket, *, grace_s: int) -> AsyncIterator[None]:
    """Serve until the block is left; what then still runs has `grace_s` seconds to end."""
    server = _Server(app, grace_s)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.stop.set()
        await task


class _Server(uvicorn.Server):
    """Serves until `stop` is set; signals and timers stay the caller's."""

    def __init__(self, app: ASGIApp, grace_s: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                date_header=False,  # uvicorn renews it by the timer that `main_loop` here does without
                lifespan="off",
                loop="none",
                timeout_graceful_shutdown=grace_s,
            )
        )
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Overridden: the caller handles signals."""
        yield

    async def main_loop(self) -> None:
        """Overridden: wait for `stop` instead of looking ten times a second."""
        await self.stop.wait()
