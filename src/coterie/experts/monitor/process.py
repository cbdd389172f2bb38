"""The monitor as a process."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import uvloop

from coterie.clock import SystemClock
from coterie.experts.membership import Tick, Timing
from coterie.experts.monitor.app import app
from coterie.experts.monitor.monitor import Monitor
from coterie.http_server import listen, serving_app, url_of

_GRACE_S = 2


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """What `coterie experts monitor` is told.

    Attributes:
        host: address to serve on.
        port: of it; 0 takes a free one.
        timing: how long to wait for what.
    """

    host: str = "127.0.0.1"
    port: int = 8100
    timing: Timing = field(default_factory=Timing)


def run(config: MonitorConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: where, and how long to wait for what.
        on_ready: told the URL once it serves.

    Raises:
        ConfigError: the address cannot be had.
    """
    uvloop.run(_run(config, on_ready))


async def _run(config: MonitorConfig, on_ready: Callable[[str], None]) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await serve(config, on_ready, ended)


async def serve(config: MonitorConfig, on_ready: Callable[[str], None], ended: asyncio.Event) -> None:
    """As `run`, in a loop of the caller's, until `ended` is set."""
    # The time of day, so that epochs go on above those of an earlier monitor; servers say what they know, too.
    monitor = Monitor(config.timing, SystemClock(), run=secrets.token_hex(8), epoch=time.time_ns() // 1_000_000)
    listener = listen(config.host, config.port, "port")
    async with serving_app(app(monitor), listener, grace_s=_GRACE_S):
        on_ready(url_of(listener))
        ticking = asyncio.create_task(_tick(monitor, config.timing.heartbeat_s / 2))
        await ended.wait()
        ticking.cancel()
        monitor.dismiss()


async def _tick(monitor: Monitor, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        monitor.hear(Tick())
