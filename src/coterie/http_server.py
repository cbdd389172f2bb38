"""Serves an ASGI application in the caller's event loop: uvicorn, but for its signals and its timers.

uvicorn bounds neither the time nor the size of what a client sends before the application sees it; that is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coterie.errors import ConfigError

BACKLOG = 4096
"""Connections that may wait to be accepted."""
REQUEST_S = 30.0
"""The longest that a request may take to arrive, from its first byte; a new connection may be silent for as long."""
HEAD_BYTES = 64 << 10
"""Where a request line and headers that go on are cut off."""


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


def reserve(host: str, port: int, flag: str, *, alone: bool = False) -> socket.socket:
    """A socket that has its address, but does not listen yet; other processes of this user may have the same one.

    Args:
        host: address of either family.
        port: of it; 0 takes a free one.
        flag: what the user would change, for the error.
        alone: whether nobody may have the address yet.

    Raises:
        ConfigError: the address cannot be had.
    """
    if alone and port:
        listen(host, port, flag).close()
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if reserved.family == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as `listen` has it
        reserved.bind((host, port))
    except OSError as error:
        reserved.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --{flag}") from None
    return reserved


def is_any(host: str) -> bool:
    """Whether a server with this address takes connections to all of its host's: nobody can reach it by that."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def port_of(listener: socket.socket) -> int:
    """The port that a socket has."""
    return int(listener.getsockname()[1])


def authority(host: str, port: int) -> str:
    """An address of either family, as URLs and `Host` have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of an address."""
    return f"http{'s' * tls}://{authority(host, port)}"


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Where a listening socket is reached."""
    return address_url(*listener.getsockname()[:2], tls=tls)


@contextlib.asynccontextmanager
async def serving_app(
    app: ASGIApp, listener: socket.socket, *, grace_s: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve until the block is left; what then still runs has `grace_s` seconds to end."""
    server = _Server(app, grace_s, tls)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.stop.set()
        await task


class _Server(uvicorn.Server):
    """Serves until `stop` is set; signals and timers stay the caller's."""

    def __init__(self, app: ASGIApp, grace_s: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_BoundedHttp,
                log_config=None,
                access_log=False,
                date_header=False,  # uvicorn renews it by the timer that `main_loop` here does without
                lifespan="off",
                loop="none",
                timeout_graceful_shutdown=grace_s,
            )
        )
        self.config.load()
        self.config.ssl = tls
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Overridden: the caller handles signals."""
        yield

    async def main_loop(self) -> None:
        """Overridden: wait for `stop` instead of looking ten times a second."""
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Overridden: uvicorn sleeps for a tenth of a second, also where no connection is left to wait for."""
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        with contextlib.suppress(TimeoutError):  # where a TLS handshake goes on
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                for server in self.servers:
                    await server.wait_closed()


class _BoundedHttp(HttpToolsProtocol):
    """uvicorn's side of one connection, with an end to requests that do not end."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._late: asyncio.TimerHandle | None = None
        self._arriving = self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        super().connection_made(transport)
        self._late = self.loop.call_later(REQUEST_S, self._cut_off, b"408 Request Timeout")

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._set_deadline(arriving=False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it; most requests arrive in one piece and need no timer."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._set_deadline(arriving=self._arriving)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._cut_off(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """As httptools has it."""
        super().on_message_begin()
        self._arriving = self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """As httptools has it."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """As httptools has it."""
        self._arriving = False
        super().on_message_complete()

    def _set_deadline(self, *, arriving: bool) -> None:
        if arriving and self._late is None:
            self._late = self.loop.call_later(REQUEST_S, self._cut_off, b"408 Request Timeout")
        elif not arriving and self._late is not None:
            self._late.cancel()
            self._late = None

    def _cut_off(self, status: bytes) -> None:
        """Close the connection; an application that still reads the body hears that the client has left."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()
