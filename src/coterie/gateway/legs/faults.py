"""What workers fail: counted, logged, and told to their breakers."""

from __future__ import annotations

import logging

from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.legs.upstream import UpstreamError
from coterie.gateway.metrics import Metrics

_log = logging.getLogger("coterie.gateway")


class Faults:
    """Takes note of every failure of a worker, whatever it was asked for."""

    def __init__(self, prefill: Fleet, decode: Fleet, metrics: Metrics) -> None:
        self._fleets = {"prefill": prefill, "decode": decode}
        self._metrics = metrics

    def lost(self, worker: Worker, error: UpstreamError) -> None:
        """A worker could not be talked to."""
        self._metrics.errors.inc(worker.name, error.kind)
        _log.warning("%s (%s)", error, worker.url)
        self._count(worker, str(error), refused=error.kind == "connect")

    def answered(self, worker: Worker, status: int) -> None:
        """A worker answered: 5xx is a failure of its own, 2xx shows that it serves, 4xx says nothing of it."""
        if status >= 500:
            self._count(worker, f"{worker.role} worker {worker.name} answers with {status}")
        elif status < 400:
            worker.breaker.succeeded()

    def talked_nonsense(self, worker: Worker, what: str) -> None:
        """A worker answered 200, and with what cannot be used."""
        _log.warning("%s (%s)", what, worker.url)
        self._count(worker, what)

    def _count(self, worker: Worker, what: str, *, refused: bool = False) -> None:
        if self._fleets[worker.role].failed(worker, what, refused=refused):
            self._metrics.breakers.inc(worker.name)
            _log.error("%s worker %s (%s) gets no requests for now: %s", worker.role, worker.name, worker.url, what)
