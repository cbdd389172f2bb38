"""Reads what decode workers say of their load, for the filters."""

from __future__ import annotations

import asyncio
import logging

from coterie.core import Reading
from coterie.errors import EngineError
from coterie.gateway.fleet.workers import Worker
from coterie.gateway.gateway import Gateway
from coterie.gateway.legs.upstream import Collected, Patience, UpstreamError
from coterie.routing import STALE_AFTER

_HEADERS = b"x-request-id: coterie-reading\r\n"
_MAX_REPLY_BYTES = 16 << 20
_log = logging.getLogger("coterie.gateway")


async def require_readings(gateway: Gateway) -> None:
    """Read each available decode worker's metrics once, before clients are served.

    A worker that does not answer now may do so later.  One that answers without the figures never will.

    Raises:
        EngineError: what a filter needs is not there.
    """
    for worker in gateway.decode.available():
        try:
            await _observe(gateway, worker)
        except UpstreamError:
            continue
        except EngineError as error:
            raise EngineError(
                f"{worker.name} ({worker.url}) cannot be filtered by its load: {error}; "
                "leave out --kv-limit and --pass-over-queues"
            ) from None


async def read(gateway: Gateway, worker: Worker) -> None:
    """Read a decode worker's metrics for ever, where a filter needs them, for the ledger to note.

    Failures are counted, and the first is logged.
    """
    failing = False
    while True:
        interval_s = gateway.config.reading_interval_s
        if gateway.config.reads_workers and worker.problem is None:
            try:
                await _observe(gateway, worker)
                failing = False
            except EngineError as error:
                gateway.metrics.reading_failures.inc(worker.name)
                if not failing:
                    _log.warning("%s (%s) cannot be filtered by its load: %s", worker.name, worker.url, error)
                failing = True
        await asyncio.sleep(interval_s)


async def _observe(gateway: Gateway, worker: Worker) -> None:
    reading = await _read_once(gateway, worker)
    gateway.decode.ledger.observe(worker.name, reading, STALE_AFTER * gateway.config.reading_interval_s)


async def _read_once(gateway: Gateway, worker: Worker) -> Reading:
    engine, timeout_s = gateway.engine, gateway.config.health_timeout_s
    reply = Collected(_MAX_REPLY_BYTES)
    await worker.pool.get(engine.metrics_path.encode(), _HEADERS, reply, Patience(timeout_s, timeout_s))
    if reply.status != 200:
        raise EngineError(f"it answered {engine.metrics_path} with {reply.status}")
    return engine.reading(reply.body())
