"""The first process of a gateway that has several: starts them, watches them, and speaks for them.

It serves no client.  The others listen on one port, among which the kernel spreads connections (`SO_REUSEPORT`), and
show each other what they hold on a board of shared memory.  One that dies takes its clients' connections with it; what
it held is taken back at once, and another is started in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import uvloop

from coterie.errors import CoterieError, EngineError
from coterie.gateway.admin.guard import serving_admin
from coterie.gateway.config import FIELDS, GatewayConfig, Source
from coterie.gateway.peers.exchange import exchanging
from coterie.gateway.processes.control import Answer, Ask, Ready, Setup, receive, send
from coterie.gateway.processes.seat import BOARD_PREFIX
from coterie.gateway.processes.together import together_app
from coterie.http_server import listen, port_of, reserve
from coterie.routing.shared_batches import PREFIX as BATCHES_PREFIX
from coterie.routing.shared_load import Board
from coterie.shm import SharedFile, sweep

ASK_S = 5.0
"""How long a process may take to answer for the admin side."""
MOST_DEATHS = 5
DEATHS_S = 60.0
_FIRST_DELAY_S = 0.1
_MARGIN_S = 5.0
_log = logging.getLogger("coterie.gateway")


class Deaths:
    """When a process is started again after one died.

    The first time after 0.1 s, then twice as long each time; not at all once 5 died within a minute.
    """

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()

    def note(self, now_s: float) -> float | None:
        """A process died.

        Returns:
            Seconds until another is to be started; None if none is.
        """
        self._times_s.append(now_s)
        while self._times_s[0] <= now_s - DEATHS_S:
            self._times_s.popleft()
        many = len(self._times_s)
        return None if many >= MOST_DEATHS else _FIRST_DELAY_S * 2 ** (many - 1)


class Member:
    """One process, while it lives.

    Attributes:
        process: it.
        ready: what it said when it served, or could not; None until then.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.ready: Ready | None = None
        self._reader = reader
        self._writer = writer
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0

    @classmethod
    async def start(cls, command: Sequence[str], setup: Setup) -> Member:
        """Start a process: the command, with the descriptor of its link as the last argument."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            process = await asyncio.create_subprocess_exec(
                *command, str(theirs.fileno()), pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL
            )
        send(writer, setup)
        return cls(process, reader, writer)

    async def live(self, on_ready: Callable[[], None]) -> int:
        """Hear what it says until it is gone.

        Returns:
            Its exit status; negative for the signal that killed it.
        """
        with contextlib.suppress(EOFError):
            while True:
                heard: Ready | Answer = await receive(self._reader, Ready, Answer)
                if isinstance(heard, Ready):
                    self.ready = heard
                    on_ready()
                elif not (future := self._asked.pop(heard.number)).done():
                    future.set_result(heard)
        self._writer.close()
        for future in self._asked.values():
            future.cancel()
        return await self.process.wait()

    async def ask(self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer | None:
        """Have its admin side answer a request; None if it does not in time, or is gone."""
        self._number += 1
        future = self._asked[self._number] = asyncio.get_running_loop().create_future()
        send(self._writer, Ask(self._number, method, target, headers, body))
        done, _ = await asyncio.wait([future], timeout=ASK_S)
        return future.result() if done and not future.cancelled() else None


class Group:
    """All processes of a gateway.

    Args:
        config: of the gateway, with the ports that it has.
        source: where it comes from, with those ports.
        command: what starts a process.
        file: memory of the board.

    Attributes:
        config: the same.
        board: where the processes show each other what they hold.
        members: the processes that live, by number.
        restarts: how often each was started again.
        starting: numbers of those that do not serve yet, and would miss a change.
        changing: held while a change is made, and while what one is to start with is asked for.
    """

    def __init__(self, config: GatewayConfig, source: Source, command: Sequence[str], file: SharedFile) -> None:
        self.config = config
        self._source = source
        self.members: dict[int, Member] = {}
        self.restarts = [0] * config.processes
        self.starting: set[int] = set()
        self.changing = asyncio.Lock()
        self._reload_late: set[int] = set()
        self._command = command
        self._file = file
        self.board = Board(file.memory, config.board_rows, config.keep_sessions)
        self._deaths = Deaths()
        self._keepers: list[asyncio.Task[None]] = []
        self._first_ready = [asyncio.Event() for _ in self.restarts]
        self._stopping = False

    async def start(self) -> tuple[str, ...]:
        """Start all processes.

        Returns:
            What the first has to say of itself.

        Raises:
            CoterieError: one cannot serve.
        """
        self._keepers = [asyncio.create_task(self._keep(number)) for number in range(self.config.processes)]
        all_ready = asyncio.create_task(self._all_ready())
        try:
            await asyncio.wait([all_ready, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            all_ready.cancel()
        self._raise_if_ended()
        ready = self.members[0].ready
        assert ready is not None
        return ready.lines

    async def watch(self) -> None:
        """Keep all processes alive, for ever.

        Raises:
            EngineError: they die again and again.
        """
        await asyncio.wait(self._keepers, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_ended()

    def signal(self, number: int) -> None:
        """Pass a signal on to all processes."""
        for member in self.members.values():
            with contextlib.suppress(ProcessLookupError):
                member.process.send_signal(number)

    def reload(self) -> None:
        """Have all read the configuration again; those that are starting do so once they serve."""
        self._reload_late |= self.starting
        for number in self.members.keys() - self.starting:
            self._reload(number)

    def _reload(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.members[number].process.send_signal(signal.SIGHUP)

    async def stop(self) -> None:
        """Let all processes end as they do when told to; kill those that have not by then."""
        self._stopping = True
        self.signal(signal.SIGTERM)
        grace_s = self.config.shutdown_grace_s + self.config.connect_timeout_s + _MARGIN_S
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=grace_s)
            self.signal(signal.SIGKILL)
            await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _all_ready(self) -> None:
        for event in self._first_ready:
            await event.wait()

    def _raise_if_ended(self) -> None:
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def _keep(self, number: int) -> None:
        """Have a process of this number as long as the gateway serves."""
        while not self._stopping:
            self.starting.add(number)
            async with self.changing:
                setup = Setup(
                    number, self.config.board_rows, str(self._file.path), *await self._present(), self._source
                )
            member = self.members[number] = await Member.start(self._command, setup)
            if self._stopping:  # since it was last looked at: `stop` knew nothing of this one
                member.process.terminate()
            status = await member.live(partial(self._heard, number, member))
            del self.members[number]
            self.starting.discard(number)
            self.board.clear(number)
            sweep(BATCHES_PREFIX)
            if not self._stopping:
                await self._after_death(number, member, status)

    async def _present(self) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
        """Configuration, workers and drained ones: a process that lives knows of changes since the start."""
        for member in self.members.values():
            if member.ready is not None:
                answer = await member.ask("GET", "/config", [], b"")
                if answer is not None and answer.status == 200:
                    found = msgspec.json.decode(answer.body)
                    return {name: found[name] for name in FIELDS}, found["urls"], tuple(found["drained"])
        found = msgspec.to_builtins(self.config)
        assert isinstance(found, dict)
        return found, {}, ()

    def _heard(self, number: int, member: Member) -> None:
        assert member.ready is not None
        if member.ready.problem is None:
            self._first_ready[number].set()
            self.starting.discard(number)
            if number in self._reload_late:
                self._reload_late.discard(number)
                self._reload(number)
            _log.info("process %d (pid %d) serves", number, member.process.pid)

    async def _after_death(self, number: int, member: Member, status: int) -> None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        problem = member.ready.problem if member.ready is not None else None
        if not self._first_ready[number].is_set():
            raise CoterieError(problem or f"process {number} {how} before it served; see what it said above")
        delay_s = self._deaths.note(asyncio.get_running_loop().time())
        if delay_s is None:
            raise EngineError(
                f"process {number} {how}, the fifth in a minute: the gateway stops; see what the processes said above"
            )
        _log.error("process %d %s%s; another starts in %g s", number, how, f": {problem}" if problem else "", delay_s)
        self.restarts[number] += 1
        await asyncio.sleep(delay_s)


def run_processes(source: Source, command: Sequence[str], *, on_ready: Callable[[Sequence[str]], None]) -> None:
    """Serve by several processes until SIGTERM or SIGINT; return when all have ended.

    SIGHUP is passed on to all.

    Args:
        source: of the configuration; its `processes` says by how many.
        command: what starts a process; it is to call `run_process` with its last argument.
        on_ready: called with what the first process has to say of itself, once all serve.

    Raises:
        CoterieError: the gateway cannot start, or its processes die again and again.
    """
    uvloop.run(_run(source, command, on_ready))


async def _run(source: Source, command: Sequence[str], on_ready: Callable[[Sequence[str]], None]) -> None:
    config, stop, loop = source.read(), asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with (
        reserve(config.host, config.port, "port", alone=True) as reserved,
        listen(config.admin_host, config.admin_port, "admin-port") as admin_listener,
        _board(config) as file,
    ):
        ports = {"port": port_of(reserved), "admin_port": port_of(admin_listener)}
        taken = {name: port for name, port in ports.items() if not getattr(config, name)}  # any port was to be taken
        source = Source(source.file, {**source.flags, **taken})
        config = dataclasses.replace(config, port=port_of(reserved), admin_port=port_of(admin_listener))
        group = Group(config, source, command, file)
        loop.add_signal_handler(signal.SIGHUP, group.reload)
        async with (
            exchanging(config, group.board, os.environ) as exchange,
            serving_admin(together_app(group, exchange), config, admin_listener),
        ):
            told = asyncio.create_task(stop.wait())
            serving = asyncio.create_task(_serve(group, on_ready))
            try:
                await asyncio.wait([told, serving], return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                _log.info("stopping: running requests have %g s to end", config.shutdown_grace_s)
            finally:
                await group.stop()
                for task in (told, serving):
                    task.cancel()
                await asyncio.gather(told, serving, return_exceptions=True)


async def _serve(group: Group, on_ready: Callable[[Sequence[str]], None]) -> None:
    on_ready(await group.start())
    await group.watch()


@contextlib.contextmanager
def _board(config: GatewayConfig) -> Iterator[SharedFile]:
    file = SharedFile.create(BOARD_PREFIX, Board.size(config.board_rows, config.keep_sessions))
    try:
        yield file
    finally:
        file.unlink()
