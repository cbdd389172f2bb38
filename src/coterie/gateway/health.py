"""Watches the workers while the gateway runs."""

from __future__ import annotations

import asyncio
import logging

from coterie.errors import EngineError
from coterie.gateway.gateway import Gateway
from coterie.gateway.probe import Prober
from coterie.gateway.upstream import UpstreamError
from coterie.gateway.workers import Worker

FAILURES = 3
"""Checks that must fail in a row before a worker is taken out: one slow answer is no reason."""

_log = logging.getLogger("coterie.gateway")


async def watch(gateway: Gateway, worker: Worker) -> None:
    """Check a worker for ever: take it out when it fails, back in when it can do its part again."""
    prober, failures = Prober(gateway.engine, gateway.config), 0
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(gateway.config.health_interval_s)
        since_s = loop.time()
        try:
            await _check(gateway, prober, worker)
            failures = 0
        except EngineError as error:
            # A busy server may be late with its health while it serves: what it sent meanwhile shows that it lives.
            slow = isinstance(error, UpstreamError) and error.kind == "timeout"
            failures = 0 if slow and worker.pool.heard_s > since_s else failures + 1
            if worker.problem is not None or failures >= FAILURES:
                _take_out(gateway, worker, str(error))


async def _check(gateway: Gateway, prober: Prober, worker: Worker) -> None:
    await prober.check(worker)
    if worker.problem is None:
        return
    others = gateway.decode if worker.role == "prefill" else gateway.prefill
    for other in others.available():
        if other.name not in prober.models:
            await prober.check(other)
    await prober.admit(worker, gateway.fleet_of(worker), others.available())
    _log.warning("%s worker %s (%s) is available", worker.role, worker.name, worker.url)


def _take_out(gateway: Gateway, worker: Worker, problem: str) -> None:
    if worker.problem is None:
        _log.error("%s worker %s (%s) is taken out: %s", worker.role, worker.name, worker.url, problem)
    gateway.fleet_of(worker).set_problem(worker, problem)
