"""Runs the gateway as a process: listens, starts up, serves, and stops when told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.engines.base import Engine
from coterie.gateway.access import read_access
from coterie.gateway.admin import admin_app
from coterie.gateway.admin_guard import serving_admin
from coterie.gateway.background import work
from coterie.gateway.config import GatewayConfig
from coterie.gateway.gateway import Gateway
from coterie.gateway.health import Watch
from coterie.gateway.readings import read
from coterie.gateway.seat import Seat
from coterie.gateway.startup import start_up
from coterie.gateway.tls import CLOSING_S, HANDSHAKE_S
from coterie.http_server import BACKLOG, listen, url_of

_log = logging.getLogger("coterie.gateway")


@dataclass(frozen=True, slots=True)
class Serving:
    """A gateway that serves.

    Attributes:
        gateway: the gateway.
        profile: what it routes by; None without one.
        url: where clients reach it.
        admin_url: where its admin side is.
    """

    gateway: Gateway
    profile: Profile | None
    url: str
    admin_url: str


def run(config: GatewayConfig, engine: Engine, *, on_ready: Callable[[Serving], None]) -> None:
    """Serve until SIGTERM or SIGINT; return when running requests have ended or their grace is over.

    Args:
        config: what to serve.
        engine: the dialect of the workers.
        on_ready: called once clients are served.

    Raises:
        CoterieError: the gateway cannot start; nothing was served.
    """
    uvloop.run(until_told(serving(config, engine), on_ready))


def _settle() -> None:
    """Spare the garbage collector what lives as long as the process, and most of its runs over what soon dies anyway.

    Requests leave no cycles behind but where they failed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def until_told(
    serving: contextlib.AbstractAsyncContextManager[Serving], on_ready: Callable[[Serving], None]
) -> None:
    """Serve until SIGTERM or SIGINT, which may also come before it serves; see `run`."""
    stop, task, loop = asyncio.Event(), asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        async with serving as served:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            on_ready(served)
            _settle()
            await stop.wait()
            _log.info("stopping: running requests have %g s to end", served.gateway.config.shutdown_grace_s)
    except asyncio.CancelledError:
        _log.info("stopped before it served")


@contextlib.asynccontextmanager
async def serving(config: GatewayConfig, engine: Engine) -> AsyncIterator[Serving]:
    """A gateway that serves until the block is left.

    Raises:
        CoterieError: the gateway cannot start; nothing was served.
    """
    with (
        listen(config.host, config.port, "port") as listener,
        listen(config.admin_host, config.admin_port, "admin-port") as admin_listener,
    ):

        def admin(app: ASGIApp) -> contextlib.AbstractAsyncContextManager[None]:
            return serving_admin(app, config, admin_listener)

        async with serving_on(config, engine, listener, admin) as (gateway, profile):
            url = url_of(listener, tls=config.tls_cert is not None)
            yield Serving(gateway, profile, url, url_of(admin_listener, tls=config.admin_tls))


@contextlib.asynccontextmanager
async def serving_on(
    config: GatewayConfig,
    engine: Engine,
    listener: socket.socket,
    admin: Callable[[ASGIApp], contextlib.AbstractAsyncContextManager[None]],
    seat: Seat | None = None,
) -> AsyncIterator[tuple[Gateway, Profile | None]]:
    """A gateway that serves clients on a socket until the block is left, and what it routes by.

    Args:
        config: what to serve.
        engine: the dialect of the workers.
        listener: clients' socket; listens once they are served, if it does not yet.
        admin: serves the admin side as long as its block lasts.
        seat: this process's place, where the gateway has several.

    Raises:
        CoterieError: the gateway cannot start; nothing was served.
    """
    profile = Profile.load(Path(config.profile)) if config.profile else None
    access = read_access(config, os.environ)
    trace = ActivationTrace.load(Path(config.trace)) if config.trace else None
    gateway = Gateway(config, engine, access=access, seat=seat)
    try:
        async with admin(admin_app(gateway)):
            await start_up(gateway, profile, trace)
            async with _clients(gateway, listener), _watchers(gateway):
                yield gateway, profile
    finally:
        gateway.stop()


@contextlib.asynccontextmanager
async def _clients(gateway: Gateway, listener: socket.socket) -> AsyncIterator[None]:
    tls = gateway.entrance.access.tls
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


@contextlib.asynccontextmanager
async def _watchers(gateway: Gateway) -> AsyncIterator[None]:
    endless = [work(gateway.decode), *(Watch(gateway, worker).run() for worker in gateway.workers)]
    if gateway.config.reads_workers:
        endless += [read(gateway, worker) for worker in gateway.decode.workers.values()]
    tasks = [asyncio.create_task(one) for one in endless]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
