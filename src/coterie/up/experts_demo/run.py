"""The demo's course: load, a kill, a scale-out; and a diary of what happens."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coterie.calibration.prompts import Prompt
from coterie.errors import EngineError
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import ServerRow, Status
from coterie.up.cluster import Cluster, Member
from coterie.up.experts_command import expert_shares
from coterie.up.experts_demo.load import Load

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What happens when, in seconds since the load began.

    Attributes:
        kill_s: a server is killed.
        grow_s: another one is started.
        end_s: the load ends.
        streams: requests at a time.
        max_tokens: output tokens of each.
    """

    kill_s: float = 8.0
    grow_s: float = 18.0
    end_s: float = 30.0
    streams: int = 8
    max_tokens: int = 32


class ExpertsDemo:
    """One run, on a cluster that is up and has expert servers and a gateway.

    Args:
        cluster: which.
        prompts: what clients ask.
        options: what happens when.

    Attributes:
        status: the monitor's last answer; None before the first.
        diary: what happened, and when.
        marks: of it, what begins a phase.
        load: what clients do and see.
        tell: is told of each entry of the diary.
        ended_s: when the load ended.
    """

    def __init__(self, cluster: Cluster, prompts: Sequence[Prompt], options: DemoOptions) -> None:
        self._cluster, self._options = cluster, options
        self._began_s = time.monotonic()
        self._states: dict[str, str] = {}
        self._awaited: set[str] = set()  # servers whose next life begins a phase
        self.tell: Callable[[float, str], None] = lambda at_s, text: None
        self.ended_s = 0.0
        self.status: Status | None = None
        self.diary: list[tuple[float, str]] = []
        self.marks: list[tuple[float, str]] = []
        self.load = Load(
            cluster.gateway_url,
            cluster.config.served_model_name,
            prompts,
            streams=options.streams,
            max_tokens=options.max_tokens,
            now=self.now,
        )

    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began_s

    async def run(self) -> None:
        """All of it.

        Raises:
            EngineError: a process of the cluster is lost for good, or the monitor does not answer.
        """
        self._began_s = time.monotonic()
        await self._look()
        self._watching = asyncio.create_task(self._watch())
        try:
            async with self.load.running():
                self._mark(f"{len(self._serving())} servers")
                await self._until(self._options.kill_s)
                self._kill(self._busiest())
                await self._until(self._options.grow_s)
                await self._grow()
                await self._until(self._options.end_s)
                self.ended_s = self.now()
        finally:
            self._watching.cancel()

    # --- what is done ----------------------------------------------------------------------------------

    async def _until(self, at_s: float) -> None:
        while (left_s := at_s - self.now()) > 0:
            self._cluster.check()
            if self._watching.done():
                self._watching.result()  # it raises: the monitor does not answer
            await asyncio.sleep(min(left_s, _LOOK_S))

    def _kill(self, member: Member) -> None:
        name, pid = member.process.spec.name, member.process.pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        self._mark(f"{name} is killed")
        self._note(f"KILLED {name}: SIGKILL to process group {pid}")
        self._awaited.add(name)

    async def _grow(self) -> None:
        config = self._cluster.config
        assert config.experts is not None
        busiest = self._busiest().process.spec.name
        share = expert_shares(config.experts, config.model)[int(busiest.rpartition("-")[2])]
        name = f"experts-{config.experts.servers}"
        self._note(f"STARTING {name}, with the experts of {busiest}, the busiest: {share}")
        self._awaited.add(name)
        await asyncio.to_thread(self._cluster.start_expert_server, name, share)

    def _busiest(self) -> Member:
        names = {row.name: row.pairs_per_s for row in self._serving()}
        running = [member for member in self._cluster.members("experts") if member.process.spec.name in names]
        if not running:
            raise EngineError(f"no expert server serves; see the logs in {self._cluster.config.run_dir}")
        return max(running, key=lambda member: names[member.process.spec.name])

    # --- what is seen ----------------------------------------------------------------------------------

    def _serving(self) -> list[ServerRow]:
        return [row for row in self.status.servers if row.state == "serving"] if self.status else []

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        """Ask the monitor, and note what has changed."""
        self.status = await asyncio.to_thread(ask, self._cluster.monitor_url, "GET", "/status", Status)
        for row in self.status.servers:
            if self._states.get(row.id) != row.state:
                self._states[row.id] = row.state
                self._note(f"{row.name} is {row.state}" + (f": {row.reason}" if row.reason else ""))
                if row.name in self._awaited and row.state == "serving":
                    self._awaited.remove(row.name)
                    self._mark(f"{row.name} serves")

    def _note(self, text: str) -> None:
        self.diary.append((self.now(), text))
        self.tell(*self.diary[-1])

    def _mark(self, name: str) -> None:
        self.marks.append((self.now(), name))
