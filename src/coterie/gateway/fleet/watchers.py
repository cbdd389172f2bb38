"""The tasks that run for as long as a worker is one of the gateway's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from coterie.gateway.fleet.background import work
from coterie.gateway.fleet.health import Watch
from coterie.gateway.fleet.readings import read
from coterie.gateway.fleet.workers import Worker
from coterie.gateway.gateway import Gateway

_log = logging.getLogger("coterie.gateway")


class Watchers:
    """Watches the workers' health and, for filters, their load; and does the decode policy's work.

    Args:
        gateway: whose workers.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._work = _begun(work(gateway.decode))
        self._of: dict[Worker, list[asyncio.Task[None]]] = {}

    def follow(self) -> None:
        """Begin to watch workers that have come, and end it for those that were taken out."""
        present = [*self._gateway.prefill.targets, *self._gateway.decode.targets]
        for worker in [worker for worker in self._of if worker not in present]:
            for task in self._of.pop(worker):
                task.cancel()
        for worker in present:
            if worker not in self._of:
                self._of[worker] = [_begun(endless) for endless in self._endless(worker)]

    async def stop(self) -> None:
        """End all of it."""
        tasks = [self._work, *(task for tasks in self._of.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _endless(self, worker: Worker) -> list[Coroutine[Any, Any, None]]:
        watch = Watch(self._gateway, worker).run()
        return [watch, read(self._gateway, worker)] if worker.role == "decode" else [watch]


def _begun(endless: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(endless)
    task.add_done_callback(_tell_of_fault)
    return task


def _tell_of_fault(task: asyncio.Task[None]) -> None:
    """Nobody waits for these tasks: one that ends by a fault of the gateway's would end unseen."""
    if not task.cancelled():
        _log.error("%s has ended", task.get_coro(), exc_info=task.exception())
