"""Watches the workers while the gateway runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from coterie.errors import EngineError
from coterie.gateway.fleet.workers import Worker
from coterie.gateway.gateway import Gateway
from coterie.gateway.legs.upstream import UpstreamError

FAILURES = 3
"""Checks that must fail in a row before a worker is taken out: one slow answer is no reason."""

_log = logging.getLogger("coterie.gateway")


class Watch:
    """Checks one worker for ever: keeps requests from it when it fails, and sends them again when it does its part.

    Args:
        gateway: whose worker.
        worker: which.
    """

    def __init__(self, gateway: Gateway, worker: Worker) -> None:
        self._gateway = gateway
        self._worker = worker
        self._fleet = gateway.fleet_of(worker)
        self._prober = gateway.prober
        self._failures = 0
        self._failing_since_s = 0.0
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Wait and look, without end."""
        worker = self._worker
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await worker.alarm.wait()
            worker.alarm.clear()
            try:
                await self._look()
            except Exception:  # a fault of the gateway's: unwatched, the worker would stay as it is for good
                _log.exception("the watch of %s failed; it goes on", worker.name)

    async def _look(self) -> None:
        if self._worker.breaker.begin_trial(self._fleet.clock.now()):
            await self._try()
        elif self._worker.breaker.state == "closed":
            await self._check()

    def _pause_s(self) -> float:
        """Until the next check, or the trial of a breaker that is open."""
        if self._worker.breaker.state == "open":
            return max(0.0, self._worker.breaker.until_s - self._fleet.clock.now())
        return self._gateway.config.health_interval_s

    async def _try(self) -> None:
        """The trial of an open breaker: requests of our own rather than a client's."""
        since_s = self._loop.time()
        try:
            await self._prober.check(self._worker)
            await self._admit()
        except EngineError as error:
            self._fleet.trial_over(self._worker, str(error))
            self._count(since_s)
        except Exception as error:
            self._fleet.trial_over(self._worker, repr(error))  # else no other would be begun
            raise
        else:
            self._fleet.trial_over(self._worker, None)
            self._back()

    async def _check(self) -> None:
        worker, since_s = self._worker, self._loop.time()
        try:
            await self._prober.check(worker)
            if "unhealthy" in worker.problems:
                await self._admit()
                self._back()
        except EngineError as error:
            self._failed(error, since_s)
        else:
            self._failures = 0

    async def _admit(self) -> None:
        """Let the worker do its part with each of the other role."""
        fleet = self._gateway.decode if self._worker.role == "prefill" else self._gateway.prefill
        await self._prober.admit(self._worker, [other for other in fleet.available() if await self._known(other)])

    async def _known(self, other: Worker) -> bool:
        """Whether the models of a worker of the other role are known; its own watch sees to it if it does not say."""
        if other.name not in self._prober.models:
            try:
                await self._prober.check(other)
            except EngineError:
                return False
        return True

    def _back(self) -> None:
        self._failures = 0
        self._fleet.set_problem(self._worker, "unhealthy", None)
        _log.warning("%s worker %s (%s) is well", self._worker.role, self._worker.name, self._worker.url)

    def _failed(self, error: EngineError, since_s: float) -> None:
        worker, kind = self._worker, error.kind if isinstance(error, UpstreamError) else None
        if kind == "connect":
            self._fleet.failed(worker, str(error), refused=True)
        # A busy server may be late with its health while it serves: what it sent meanwhile shows that it lives.
        serves = kind == "timeout" and worker.pool.heard_s > since_s
        if serves:
            self._failures = 0
            return
        self._count(since_s)
        if self._failures >= FAILURES or "unhealthy" in worker.problems:
            if worker.problem is None:
                _log.error("%s worker %s (%s) is taken out: %s", worker.role, worker.name, worker.url, error)
            self._fleet.set_problem(worker, "unhealthy", str(error))

    def _count(self, since_s: float) -> None:
        """Count a check that failed; give up requests at a worker from which nothing has been heard for so many.

        One that hangs, or whose host is gone, would keep them until their own time is over.  One that takes no more
        connections but ends its streams, as servers do that are told to stop, is heard.
        """
        if self._failures == 0:
            self._failing_since_s = since_s
        self._failures += 1
        silent_s = self._loop.time() - max(self._failing_since_s, self._worker.pool.heard_s)
        if silent_s >= FAILURES * self._gateway.config.health_timeout_s:
            self._worker.pool.cut("answers neither requests nor health checks")
