"""Runs the gateway as a process: listens, starts up, serves, and stops when told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import uvloop
from starlette.types import ASGIApp

from coterie.engines.base import Engine
from coterie.gateway.admin.app import admin_app
from coterie.gateway.admin.changes import Changes
from coterie.gateway.admin.guard import serving_admin
from coterie.gateway.config import GatewayConfig, Source
from coterie.gateway.edge.tls import CLOSING_S, HANDSHAKE_S, following
from coterie.gateway.fleet.startup import start_up
from coterie.gateway.gateway import Gateway
from coterie.gateway.inputs import read_inputs
from coterie.gateway.peers.exchange import Exchange, exchanging
from coterie.gateway.processes.seat import Seat
from coterie.http_server import BACKLOG, listen, url_of
from coterie.routing.shared_load import Board

_OTHER_DESCRIPTORS = 256
_log = logging.getLogger("coterie.gateway")


@dataclass(frozen=True, slots=True)
class Serving:
    """A gateway that serves.

    Attributes:
        gateway: the gateway.
        changes: changes it.
        url: where clients reach it.
        admin_url: where its admin side is.
    """

    gateway: Gateway
    changes: Changes
    url: str
    admin_url: str


def run(source: Source, engine: Engine, *, on_ready: Callable[[Serving], None]) -> None:
    """Serve until SIGTERM or SIGINT; return when running requests have ended or their grace is over.

    On SIGHUP the configuration and its files are read again.

    Args:
        source: where the configuration comes from.
        engine: the dialect of the workers.
        on_ready: called once clients are served.

    Raises:
        CoterieError: the gateway cannot start; nothing was served.
    """
    config = source.read()
    allow_descriptors(config.max_connections)
    uvloop.run(until_told(serving(config, engine, source.read), on_ready))


def settle() -> None:
    """Spare the garbage collector what lives as long as the process, and most of its runs over what soon dies anyway.

    Requests leave no cycles behind but where they failed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def allow_descriptors(connections: int) -> None:
    """Let this process open a descriptor for each client and one for the worker that serves it, as far as it may."""
    wanted = 2 * connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning(
            "%d files may be open, and %d connections may need %d: allow more (ulimit -Hn), or lower --max-connections",
            allowed,
            connections,
            wanted,
        )


async def until_told(
    serving: contextlib.AbstractAsyncContextManager[Serving], on_ready: Callable[[Serving], None]
) -> None:
    """Serve until SIGTERM or SIGINT, which may also come before it serves; reload on SIGHUP; see `run`."""
    stop, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    loop.add_signal_handler(signal.SIGHUP, _log.warning, "SIGHUP: still starting, nothing is read again")
    try:
        async with serving as served:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            loop.add_signal_handler(signal.SIGHUP, served.changes.reload_soon)
            on_ready(served)
            settle()
            await stop.wait()
            _log.info("stopping: running requests have %g s to end", served.gateway.config.shutdown_grace_s)
    except asyncio.CancelledError:
        _log.info("stopped before it served")


@contextlib.asynccontextmanager
async def serving(
    config: GatewayConfig, engine: Engine, read: Callable[[], GatewayConfig] | None = None
) -> AsyncIterator[Serving]:
    """A gateway that serves until the block is left.

    Args:
        config: what to serve.
        engine: the dialect of the workers.
        read: reads the configuration again, for reloads; None where it comes from no file, and stays.

    Raises:
        CoterieError: the gateway cannot start; nothing was served.
    """
    with (
        listen(config.host, config.port, "port") as listener,
        listen(config.admin_host, config.admin_port, "admin-port") as admin_listener,
    ):

        def admin(app: ASGIApp) -> contextlib.AbstractAsyncContextManager[None]:
            return serving_admin(app, config, admin_listener)

        async with (
            _sitting(config) as (seat, exchange),
            serving_on(config, engine, listener, admin, seat, read, exchange) as changes,
        ):
            url = url_of(listener, tls=config.tls_cert is not None)
            yield Serving(changes.gateway, changes, url, url_of(admin_listener, tls=config.admin_tls))


@contextlib.asynccontextmanager
async def _sitting(config: GatewayConfig) -> AsyncIterator[tuple[Seat | None, Exchange | None]]:
    """The place and the part in the exchange of a gateway of one process that has peers; else nothing."""
    if not config.peer:
        yield None, None
        return
    rows, sessions = config.board_rows, config.keep_sessions
    board = Board(bytearray(Board.size(rows, sessions)), rows, sessions)
    with contextlib.closing(Seat(0, board)) as seat:
        async with exchanging(config, board, os.environ) as exchange:
            yield seat, exchange


@contextlib.asynccontextmanager
async def serving_on(
    config: GatewayConfig,
    engine: Engine,
    listener: socket.socket,
    admin: Callable[[ASGIApp], contextlib.AbstractAsyncContextManager[None]],
    seat: Seat | None = None,
    read: Callable[[], GatewayConfig] | None = None,
    exchange: Exchange | None = None,
) -> AsyncIterator[Changes]:
    """A gateway that serves clients on a socket until the block is left, and who changes it.

    Args:
        config: what to serve.
        engine: the dialect of the workers.
        listener: clients' socket; listens once they are served, if it does not yet.
        admin: serves the admin side as long as its block lasts.
        seat: this process's place, where the gateway has several or peers.
        read: see `serving`.
        exchange: its part in the exchange with peers, where this process speaks for the gateway.

    Raises:
        CoterieError: the gateway cannot start; nothing was served.
    """
    inputs = read_inputs(config, os.environ)
    gateway = Gateway(config, engine, access=inputs.access, seat=seat)
    changes = Changes(gateway, inputs, read or (lambda: gateway.config))
    if exchange is not None:
        gateway.metrics.registry.register(exchange)
    try:
        async with admin(admin_app(changes, exchange)):
            await start_up(gateway, inputs)
            async with _clients(gateway, listener), changes.running():
                yield changes
    finally:
        gateway.stop()


@contextlib.asynccontextmanager
async def _clients(gateway: Gateway, listener: socket.socket) -> AsyncIterator[None]:
    tls = gateway.entrance.access.tls
    if tls is not None:
        tls = following(tls, lambda: gateway.entrance.access.tls)
    server = await asyncio.get_running_loop().create_server(
        gateway.connect,
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=HANDSHAKE_S if tls else None,
        ssl_shutdown_timeout=CLOSING_S if tls else None,
    )
    try:
        yield
    finally:
        server.close()
        await gateway.finish(gateway.config.shutdown_grace_s)
