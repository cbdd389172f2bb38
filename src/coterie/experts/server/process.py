"""An expert server as a process: loads its experts, serves them, and ends when its clients have gone elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from coterie.errors import ConfigError, EngineError
from coterie.experts.members import Held, Phase, Server
from coterie.experts.monitor.messages import Load, Welcome
from coterie.experts.protocol import SlotShape, Status
from coterie.experts.registration import Account, Registration
from coterie.experts.server.app import app, resident_bytes
from coterie.experts.server.holdings import Progress, load_experts, parse_experts
from coterie.experts.server.kernels import KernelName, make_kernel
from coterie.experts.server.paced import PacedKernel
from coterie.experts.server.server import ExpertServer
from coterie.experts.transport import Intake, SharedServer
from coterie.experts.transport.nixl import Agent, NixlServer
from coterie.experts.transport.tcp import TcpServer
from coterie.experts.transport.tcp.streams import notice_loss
from coterie.http_server import is_any, listen, serving_app, url_of
from coterie.modeling.expert_tensors import ExpertFiles, ExpertModel, read_expert_model
from coterie.modeling.model import keep_freed_memory

QUIET_S = 1.0
"""A draining server that is not needed ends after so long without a request."""
_LOOK_S = 0.1
_GRACE_S = 2
_SWITCH_S = 0.0005  # the computing thread waits so long for the HTTP side; by default ten times as long


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `coterie experts serve` is told; its options say more.

    Attributes:
        model: folder of the checkpoint.
        experts: which to have; see `parse_experts`.
        name: for people.
        kernel: what computes; see `make_kernel`.
        pairs_per_s: the most pairs of token and expert to compute in a second; None for as many as can be.
        monitor: URL of the monitor; None for none.
        host: address of the HTTP side.
        port: of it; 0 takes a free one.
        tcp_host: address for requests by TCP; None for that of the HTTP side.
        tcp_port: of it; 0 takes a free one; None for none.
        nixl: whether to take requests by NIXL.
        slots: how many clients at a time.
        max_tokens: most tokens of a request.
        drain_s: how long to serve on after SIGTERM, at most.

    Raises:
        ConfigError: a number is out of range, an address for TCP has no port, or others cannot know the host.
    """

    model: Path
    experts: str = "all"
    name: str = "experts"
    kernel: KernelName = "coterie"
    pairs_per_s: float | None = None
    monitor: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    tcp_host: str | None = None
    tcp_port: int | None = None
    nixl: bool = False
    slots: int = 16
    max_tokens: int = 512
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for name, least in {"slots": 1, "max_tokens": 1, "drain_s": 0}.items():
            if not getattr(self, name) >= least:
                raise ConfigError(f"expert server: {name} is {getattr(self, name)}; it must be at least {least}")
        if self.tcp_host is not None and self.tcp_port is None:
            raise ConfigError(f"expert server: tcp_host is {self.tcp_host}, without a port; give --tcp-port, too")
        if (self.tcp_port is not None or self.nixl) and self.monitor and is_any(self.host):
            raise ConfigError(
                f"expert server: clients of other hosts would look for {self.host!r}; give --host an address"
            )


class ServerProcess:
    """The parts of a server process, from the start of loading to its end.

    Args:
        config: what to serve.

    Attributes:
        phase: joining while it loads, then serving, then draining.
        model: whose experts they are.
        fingerprint: what they are known by; see `ExpertFiles.fingerprint`.
        shared: where clients of this host hand it requests.
        tcp: where others do; None for nowhere.
        nixl: the slots of those that do so by NIXL; None for none.
        intake: all ways by which requests come.
        serving: what computes them; None while it loads.
        over: set when clients that hold slots by HTTP are to leave.

    Raises:
        ConfigError: there is no such address for TCP.
        InputError: the checkpoint cannot be read, or does not have the experts.
        UnsupportedError: experts that are not computed here, too little shared memory, or no NIXL.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.id = config, secrets.token_hex(16)
        self.model: ExpertModel = read_expert_model(config.model)
        self._wanted: Held = parse_experts(config.experts, self.model.geometry)
        self.fingerprint = ExpertFiles.open(config.model).fingerprint()
        geometry, known_by = self.model.geometry, bytes.fromhex(self.fingerprint)
        sizes = config.max_tokens, self.model.hidden, geometry.top_k, geometry.layers, geometry.experts
        shape = SlotShape(*sizes, fingerprint=known_by)
        with contextlib.ExitStack() as undo:
            self.intake = self._open(shape, undo)
            undo.pop_all()  # from now on `close` does it
        self.phase: Phase = "joining"
        self.over = asyncio.Event()
        self.serving: Serving | None = None

    def _open(self, shape: SlotShape, undo: contextlib.ExitStack) -> Intake:
        """Open all ways; `undo` gets what closes them again if one cannot be opened."""
        config, listener = self.config, _tcp_listener(self.config)
        if listener:
            undo.callback(listener.close)
        agent = Agent(self.id) if config.nixl else None
        if agent:
            undo.callback(agent.close)
        self.shared = SharedServer(shape, config.slots)
        undo.callback(self.shared.close)
        self.tcp = TcpServer(listener, bytes.fromhex(self.id), self.shared, config.slots) if listener else None
        if self.tcp:
            undo.callback(self.tcp.close)
        self.nixl = NixlServer(agent, self.shared, config.slots) if agent else None
        return Intake(self.shared, *(inlet for inlet in (self.tcp, self.nixl) if inlet))

    @property
    def held(self) -> Held:
        """Which experts it has, or will have."""
        return self.serving.server.holding.held if self.serving else self._wanted

    @property
    def model_name(self) -> str:
        """What its model is called."""
        return self.config.model.resolve().name

    def load(self, progress: Progress) -> Serving:
        """Load the experts, and compute them from then on.

        Raises:
            CoterieError: a file is damaged, a tensor missing or wrong, or the kernel cannot compute these experts here.
        """
        files, kernel = ExpertFiles.open(self.config.model), make_kernel(self.config.kernel)
        if self.config.pairs_per_s is not None:
            kernel = PacedKernel(kernel, self.config.pairs_per_s)
        holding = load_experts(files, self._wanted, kernel, progress=progress)
        gc.collect()
        gc.freeze()  # what lives as long as the process; requests leave no cycles behind
        keep_freed_memory()
        self.serving = Serving(self.intake, ExpertServer(self.model, kernel, holding))
        return self.serving

    def account(self, url: str) -> Account:
        """What to tell the monitor."""
        server = Server(
            id=self.id,
            name=self.config.name,
            model=self.model_name,
            fingerprint=self.fingerprint,
            url=url,
            address=str(self.shared.path),
            tokens=self.config.max_tokens,
            experts=self.model.geometry.experts,
            held=self.held,
        )
        return Account(server, self.phase, self.serving.load() if self.serving else None)

    def welcomed(self, welcome: Welcome) -> None:
        """Hear from the monitor since when it has its experts."""
        if self.serving:
            self.serving.server.date(welcome.since)

    def close(self) -> None:
        """Answer what is in hand, and end."""
        if self.serving:
            self.serving.close()
        self.intake.close()


class Serving:
    """A thread that computes what comes."""

    def __init__(self, intake: Intake, server: ExpertServer[Any]) -> None:
        self.intake, self.server = intake, server
        self._problem: BaseException | None = None  # what ended the thread by itself
        self._asked_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that the thread has not ended by itself.

        Raises:
            EngineError: it has.
        """
        if self._problem is not None:
            raise EngineError(f"the expert server has stopped: {self._problem!r}")

    def is_quiet(self) -> bool:
        """Whether no client has asked for a while."""
        return time.monotonic() - self._asked_s > QUIET_S

    @property
    def requests(self) -> dict[str, int]:
        """Requests so far, by what became of them."""
        counts = self.server.usage.requests | {Status.MALFORMED: self.intake.malformed}
        return {status.name.lower(): count for status, count in counts.items()}

    def load(self) -> Load:
        """What it has done, as the monitor is told."""
        usage, held = self.server.usage, self.server.holding.held
        tokens = tuple(tuple(row[list(ids)].tolist()) for row, ids in zip(usage.load, held, strict=True))
        return Load(tokens, usage.merged, usage.batches, self.intake.waiting, resident_bytes())

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                if self.intake.step(self.server.compute, _LOOK_S):
                    self.server.tally()
                    self._asked_s = time.monotonic()
        except BaseException as error:
            self._problem = error


def _tcp_listener(config: ServeConfig) -> socket.socket | None:
    if config.tcp_port is None:
        return None
    return listen(config.tcp_host or config.host, config.tcp_port, "tcp-port")


class _StoppedError(Exception):
    """SIGTERM came while the experts were loaded."""


def run(config: ServeConfig, *, on_ready: Callable[[str, ServerProcess], None], progress: Progress) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    Args:
        config: what to serve.
        on_ready: told the URL once clients are served.
        progress: told how far loading is.

    Raises:
        CoterieError: the server cannot start, or has stopped by itself.
    """
    uvloop.run(_run(config, on_ready, progress))


async def _run(config: ServeConfig, on_ready: Callable[[str, ServerProcess], None], progress: Progress) -> None:
    sys.setswitchinterval(_SWITCH_S)
    signals = _signals()
    with listen(config.host, config.port, "port") as listener:
        notice_loss(listener)  # its connections have it, too; one of a host that is gone would keep a slot
        process, url = ServerProcess(config), url_of(listener)
        with contextlib.suppress(_StoppedError), contextlib.closing(process), _registered(process, url) as registration:
            async with serving_app(app(process), listener, grace_s=_GRACE_S):
                await _serve(process, registration, signals, lambda: on_ready(url, process), progress)


async def _serve(
    process: ServerProcess,
    registration: Registration | None,
    signals: tuple[asyncio.Event, asyncio.Event],
    on_ready: Callable[[], None],
    progress: Progress,
) -> None:
    """Load, serve, and drain; however that ends, clients that hold slots by HTTP are to leave then."""
    stop, at_once = signals

    def load_on(done: int, total: int) -> None:
        if stop.is_set():
            raise _StoppedError
        progress(done, total)

    try:
        serving = await asyncio.to_thread(process.load, load_on)
        _enter(process, "serving", registration)
        on_ready()
        await _until(stop, serving)
        _enter(process, "draining", registration)
        await _drain(process, serving, at_once, registration)
    finally:
        process.over.set()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events that the first signal sets, and the second."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def end() -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    return stop, at_once


@contextlib.contextmanager
def _registered(process: ServerProcess, url: str) -> Iterator[Registration | None]:
    """Keep the process known to its monitor, if it has one."""
    if process.config.monitor is None:
        yield None
        return
    process.account(url)  # what is wrong with it is an error here, and not one of the thread
    registration = Registration(process.config.monitor, lambda: process.account(url), process.welcomed)
    registration.start()
    try:
        yield registration
    finally:
        registration.close()


def _enter(process: ServerProcess, phase: Phase, registration: Registration | None) -> None:
    process.phase = phase
    if registration:
        registration.tell()


async def _until(stop: asyncio.Event, serving: Serving) -> None:
    while not stop.is_set():
        serving.check()
        await _wait(stop)


async def _drain(
    process: ServerProcess, serving: Serving, at_once: asyncio.Event, registration: Registration | None
) -> None:
    """Serve on while clients ask, or have slots and the monitor says that nobody else has an expert; not for ever."""
    deadline_s = time.monotonic() + process.config.drain_s
    while process.intake.clients and time.monotonic() < deadline_s and not at_once.is_set():
        serving.check()
        welcome = registration.welcome if registration else None
        if serving.is_quiet() and not (welcome and welcome.needed):
            return
        await _wait(at_once)


async def _wait(event: asyncio.Event) -> None:
    """Wait for an event, but not long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), _LOOK_S)
