"""Changes a gateway while it runs: another configuration, other workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from coterie.core import Role
from coterie.errors import CoterieError, InputError
from coterie.gateway.config import GatewayConfig, changed
from coterie.gateway.fleet.startup import decode_policy, fitting_policy, prefill_policy
from coterie.gateway.fleet.watchers import Watchers
from coterie.gateway.fleet.workers import Fleet, Worker
from coterie.gateway.gateway import Gateway
from coterie.gateway.inputs import Inputs, read_inputs
from coterie.routing import Policy

_LOOK_S = 0.05
_PREFILL_ROUTING = frozenset({"prefill", "prefill_policy"})
_DECODE_ROUTING = frozenset(
    {"decode", "decode_policy", "profile", "trace", "tau", "refit_window_s", "on_mismatch"},
)
_log = logging.getLogger("coterie.gateway")


class NotServingError(CoterieError):
    """The gateway is still starting, and cannot be changed yet."""


class UnknownWorkerError(InputError):
    """No worker has this name."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a change of the configuration did.

    Attributes:
        generation: number of the configuration now in effect; the one at the start is 1.
        settings: names of the settings that are other than before.
        added: names of the workers that came.
        removed: names of the workers that are leaving.
        policies: roles whose policy was made anew.
    """

    generation: int
    settings: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    policies: tuple[Role, ...]


class Changes:
    """The one who changes a running gateway, one change at a time.

    A change is a whole new configuration, checked before anything of it takes effect, and then takes effect at once,
    between two steps of any request.  What refuses it leaves everything as it was.

    Args:
        gateway: what is changed.
        inputs: what was in the files that its configuration names.
        reread: the configuration as it is now in its file.

    Attributes:
        gateway: the same.
        inputs: what was in the files that are gone by.
        generation: number of the configuration in effect; 1 at the start, 0 before.
        changed_s: when it took effect, in Unix time.
    """

    def __init__(self, gateway: Gateway, inputs: Inputs, reread: Callable[[], GatewayConfig]) -> None:
        self.gateway = gateway
        self.generation = 0
        self.changed_s = 0.0
        self.inputs = inputs
        self._reread = reread
        self._one_at_a_time = asyncio.Lock()
        self._watchers: Watchers | None = None
        self._leaving: dict[Worker, asyncio.Task[None]] = {}
        self._reloads: set[asyncio.Task[None]] = set()
        show = gateway.metrics.show
        show("config_generation", "Number of the configuration in effect.", lambda: self.generation)
        show("config_changed_timestamp_seconds", "When it took effect, in Unix time.", lambda: self.changed_s)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the workers of a gateway that has started up, and take changes, until the block is left."""
        self._watchers = Watchers(self.gateway)
        self._watchers.follow()
        self._count()
        try:
            yield
        finally:
            tasks = [*self._leaving.values(), *self._reloads]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._watchers.stop()

    # --- changes -------------------------------------------------------------------------------------

    async def reload(self) -> Change:
        """Read the configuration's file and the files that it names again, and go by them.

        Raises:
            NotServingError: the gateway is still starting.
            InputError: a file is not right, or a setting has changed that cannot change now.
        """
        async with self._changing():
            try:
                config = await asyncio.to_thread(self._reread)
                change = await self._change(config, await asyncio.to_thread(read_inputs, config, os.environ))
            except InputError as error:
                self.gateway.metrics.reloads.inc("refused")
                _log.error("reload refused, everything stays as it was: %s", error)
                raise
            self.gateway.metrics.reloads.inc("applied")
            return change

    def reload_soon(self) -> None:
        """Begin a reload; what refuses it is in the log."""
        task = asyncio.create_task(self._try_reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def add(self, role: Role, url: str) -> tuple[Worker, bool]:
        """Add a worker; it is sent requests once its probes went well.  One that is there already stays as it is.

        Returns:
            the worker, and whether it is new.

        Raises:
            NotServingError: the gateway is still starting.
            InputError: the URL is none, or the profile does not fit the workers with it.
        """
        async with self._changing():
            fleet = self._fleet(role)
            (worker,) = fleet.at((url,), self.gateway.config)
            if worker in fleet.targets:
                return worker, False
            await self._set_urls(fleet, (*(target.url for target in fleet.targets), url))
            return fleet.workers[worker.name], True

    async def remove(self, name: str) -> Worker:
        """Take a worker out: it is sent nothing more, and forgotten when its last request is over.

        Raises:
            NotServingError: the gateway is still starting.
            UnknownWorkerError: no worker has this name.
            InputError: it is the last of its role, or the profile does not fit the workers without it.
        """
        async with self._changing():
            fleet, worker = self._named(name)
            if worker in fleet.targets:
                await self._set_urls(fleet, tuple(target.url for target in fleet.targets if target is not worker))
            return worker

    def drain(self, name: str, *, on: bool = True) -> Worker:
        """Send a worker nothing more, but keep it; or, if not `on`, use it again.

        Raises:
            NotServingError: the gateway is still starting.
            UnknownWorkerError: no worker has this name.
        """
        self._require_serving()
        fleet, worker = self._named(name)
        if on:
            fleet.drain(worker)
        else:
            fleet.resume(worker)
        _log.warning("%s worker %s (%s) is %s", fleet.role, name, worker.url, "draining" if on else "used again")
        return worker

    def busy(self, worker: Worker) -> bool:
        """Whether a worker has requests of this gateway, or KV of one that a decode worker is to take."""
        keeps = self.gateway.dispatcher.handoffs.kept_by(worker.name)
        return keeps or worker.pool.busy or not self.gateway.fleet_of(worker).holds_nothing(worker)

    # --- how -----------------------------------------------------------------------------------------

    async def _try_reload(self) -> None:
        with contextlib.suppress(InputError):
            await self.reload()

    def _changing(self) -> asyncio.Lock:
        self._require_serving()
        return self._one_at_a_time

    def _require_serving(self) -> None:
        if not self.generation:
            raise NotServingError("the gateway is still starting; ask again when /health answers 200")

    async def _set_urls(self, fleet: Fleet, urls: tuple[str, ...]) -> None:
        await self._change(self.gateway.config.with_workers(fleet.role, urls), self.inputs)

    async def _change(self, config: GatewayConfig, inputs: Inputs) -> Change:
        gateway = self.gateway
        settings = changed(gateway.config, config)
        prefill = gateway.prefill.at(config.prefill, config)
        decode = gateway.decode.at(config.decode, config)
        policies: dict[Role, Policy] = {}
        if not _PREFILL_ROUTING.isdisjoint(settings):
            policies["prefill"] = prefill_policy(config, prefill)
        if not _DECODE_ROUTING.isdisjoint(settings) or inputs.versions != self.inputs.versions:
            policy = await asyncio.to_thread(decode_policy, config, inputs, decode)  # of a large trace it takes a while
            policies["decode"] = fitting_policy(config, inputs, policy, [*prefill, *decode], gateway.prober)
        # From here on nothing waits and nothing fails.
        before = self._target_names()
        gateway.configure(config)
        gateway.entrance.access = inputs.access
        self.inputs = inputs
        if "prefill" in policies:
            gateway.prefill.retarget(prefill, policies["prefill"])
        if "decode" in policies:
            gateway.decode.retarget(decode, policies["decode"])
        self._follow_workers()
        self._count()
        after = self._target_names()
        change = Change(
            self.generation,
            tuple(settings),
            added=tuple(sorted(after - before)),
            removed=tuple(sorted(before - after)),
            policies=tuple(policies),
        )
        _log.info("configuration %d is in effect: %s", self.generation, change)
        return change

    def _count(self) -> None:
        self.generation += 1
        self.changed_s = time.time()

    def _follow_workers(self) -> None:
        """Watch who came, see off who leaves."""
        assert self._watchers is not None
        self._watchers.follow()
        for fleet in (self.gateway.prefill, self.gateway.decode):
            for worker in fleet.workers.values():
                if worker in fleet.targets:
                    self._stay(worker)
                elif worker not in self._leaving:
                    self._leaving[worker] = asyncio.create_task(self._see_off(fleet, worker))

    def _stay(self, worker: Worker) -> None:
        """A worker that was leaving has come back, perhaps."""
        task = self._leaving.pop(worker, None)
        if task is not None:
            task.cancel()

    async def _see_off(self, fleet: Fleet, worker: Worker) -> None:
        """Let the requests of a worker end, cut those that take too long, and forget it."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.gateway.config.removal_grace_s
        while self.busy(worker):
            if loop.time() > end_s:
                worker.pool.cut("was removed")
            await asyncio.sleep(_LOOK_S)
        del self._leaving[worker]
        fleet.forget(worker)
        self.gateway.prober.forget(worker)
        _log.info("%s worker %s (%s) is gone", worker.role, worker.name, worker.url)

    def _target_names(self) -> set[str]:
        return {worker.name for fleet in (self.gateway.prefill, self.gateway.decode) for worker in fleet.targets}

    def _fleet(self, role: Role) -> Fleet:
        return self.gateway.prefill if role == "prefill" else self.gateway.decode

    def _named(self, name: str) -> tuple[Fleet, Worker]:
        for fleet in (self.gateway.prefill, self.gateway.decode):
            if name in fleet.workers:
                return fleet, fleet.workers[name]
        known = ", ".join(worker.name for worker in self.gateway.workers)
        raise UnknownWorkerError(f"no worker is named {name!r}; there are {known}")
