"""A cluster of prefill and decode engines, and their gateway, on this machine.

    with Cluster(config) as cluster:
        cluster.prefill_urls, cluster.decode_urls, cluster.gateway_url

Start: all engines side by side, then the gateway.  Stop: the reverse.  One thread supervises in between.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import IO, Any

import yaml

from coterie.core import Role
from coterie.errors import ConfigError, EngineError
from coterie.gateway.config import load_config
from coterie.up.config import ClusterConfig, ExpertsConfig
from coterie.up.embedded_command import embedded_command
from coterie.up.experts_command import expert_shares, monitor_command, server_command
from coterie.up.ports import PortChooser
from coterie.up.priority import lower_polling_threads
from coterie.up.processes import ProcessSpec, State, SupervisedProcess
from coterie.up.vllm_command import vllm_command, vllm_env

_POLL_S = 0.25
_GATEWAY_MARGIN_S = 5.0  # for what follows its own grace
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What `coterie up` shows of one process.

    Attributes:
        name: unique in the cluster.
        role: prefill, decode, gateway, monitor or experts.
        url: where it serves.
        pid: leader of its process group; None while it does not run.
        state: see `processes.State`.
        restarts: how often it was started again.
    """

    name: str
    role: str
    url: str
    pid: int | None
    state: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster.

    Attributes:
        role: prefill, decode, gateway, monitor or experts.
        url: where it serves.
        process: the process.
        admin_url: a gateway's admin side; empty for others.
    """

    role: str
    url: str
    process: SupervisedProcess
    admin_url: str = ""

    def status(self) -> MemberStatus:
        """A snapshot."""
        process = self.process
        return MemberStatus(process.spec.name, self.role, self.url, process.pid, process.state.value, process.restarts)


class Cluster:
    """Engines and gateway of one configuration; a context manager.

    Attributes:
        config: what it was built from.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._members: list[Member] = []
        self._ports = PortChooser(os.getpid())
        self._polling = threading.Lock()  # held while members are polled, added or removed
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="coterie-up", daemon=True)
        self._calmed: set[int] = set()  # process groups whose polling threads gave way
        self._lock_file: IO[bytes] | None = None
        self._monitor_url: str | None = None  # of the expert servers

    # --- what is there -------------------------------------------------------------------------------

    @property
    def prefill_urls(self) -> list[str]:
        """Base URLs of the prefill engines."""
        return self._urls("prefill")

    @property
    def decode_urls(self) -> list[str]:
        """Base URLs of the decode engines."""
        return self._urls("decode")

    @property
    def gateway_url(self) -> str:
        """Base URL of the newest gateway.

        Raises:
            ConfigError: the cluster has none.
        """
        urls = self._urls("gateway")
        if not urls:
            raise ConfigError("this cluster runs no gateway; add `gateway:` to its file")
        return urls[-1]

    @property
    def monitor_url(self) -> str:
        """Base URL of the expert servers' monitor.

        Raises:
            ConfigError: the cluster has none.
        """
        if self._monitor_url is None:
            raise ConfigError("this cluster has no expert servers; add `experts:` to its file")
        return self._monitor_url

    def members(self, role: str | None = None) -> list[Member]:
        """The processes, in order of their start; of one role, if given."""
        return [member for member in self._members if role in (None, member.role)]

    def _urls(self, role: str) -> list[str]:
        return [member.url for member in self.members(role)]

    # --- start ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes and wait until they are ready: the monitor, expert servers, engines, the gateway.

        Raises:
            ConfigError: the engine's environment, a port or the run directory is not usable; nothing was started.
            EngineError: a process ended or was too slow; the message ends with its log.
        """
        self._lock_run_dir()
        experts = list(self._expert_servers())
        engines = [*self._engines("prefill"), *self._engines("decode")]
        self._supervisor.start()
        self._launch(experts)
        self._launch(engines)
        if self.config.gateway is not None:
            self.start_gateway(self.config.gateway)

    def start_gateway(self, keys: Mapping[str, Any], *, name: str = "gateway") -> Member:
        """Start a gateway in front of the engines, and wait until it is ready.

        Args:
            keys: of `coterie serve`, without the workers; where they name no port, or port 0, a free one is taken.
            name: of the process, its log and its configuration file.

        Raises:
            ConfigError: a key is unknown or wrong.
            EngineError: it ended or was too slow; the message ends with its log.
        """
        free = dict(zip(("port", "admin_port"), self._ports.ports(0, 2, "gateway"), strict=True))
        named = {key: value for key, value in keys.items() if key not in free or value != 0}
        document = {**free, **named, "prefill": self.prefill_urls, "decode": self.decode_urls}
        config = load_config(None, document)
        file = self.config.run_dir / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        url = f"http://{config.host}:{config.port}"
        command = (sys.executable, "-m", "coterie", "serve", "--config", str(file))
        spec = replace(self._spec(name, command, url, {}), grace_s=config.shutdown_grace_s + _GATEWAY_MARGIN_S)
        process = SupervisedProcess(spec)
        member = Member("gateway", url, process, f"http://{config.admin_host}:{config.admin_port}")
        self._launch([member])
        return member

    def start_expert_server(self, name: str, experts: str) -> Member:
        """Start one more expert server, and wait until it serves.

        Args:
            name: of the process and its log.
            experts: which, as `coterie experts serve` is told.

        Raises:
            ConfigError: the cluster has no expert servers.
            EngineError: it ended or was too slow; the message ends with its log.
        """
        monitor, config = self.monitor_url, self.config.experts
        assert config is not None
        member = self._expert_server(config, name, experts, monitor)
        self._launch([member])
        return member

    def stop_member(self, member: Member) -> None:
        """Stop one process and forget it."""
        with self._polling:
            self._members.remove(member)
        member.process.stop()

    def _expert_servers(self) -> Iterator[Member]:
        """The monitor, and the servers that register with it, if there are any; they may start side by side."""
        config = self.config.experts
        if config is None:
            return
        (port,) = self._ports.ports(config.monitor_port, 1, "experts: monitor_port")
        url = self._monitor_url = f"http://{HOST}:{port}"
        yield Member("monitor", url, SupervisedProcess(self._spec("monitor", monitor_command(HOST, port), url, {})))
        for number, share in enumerate(expert_shares(config, self.config.model)):
            yield self._expert_server(config, f"experts-{number}", share, url)

    def _expert_server(self, config: ExpertsConfig, name: str, share: str, monitor: str) -> Member:
        (port,) = self._ports.ports(0, 1, "experts")
        url = f"http://{HOST}:{port}"
        command = server_command(config, self.config.model, name, share, monitor, HOST, port)
        return Member("experts", url, SupervisedProcess(self._spec(name, command, url, config.env)))

    def _engines(self, role: Role) -> Iterator[Member]:
        config = self.config
        pool = config.prefill if role == "prefill" else config.decode
        http = self._ports.ports(_nth(config.engine_port, role, config), pool.count, "ports: engines")
        side = self._ports.ports(_nth(config.side_channel_port, role, config), pool.count, "ports: side_channels")
        for number, (port, side_port) in enumerate(zip(http, side, strict=True)):
            name, url = f"{role}-{number}", f"http://{HOST}:{port}"
            command, env = _engine_command(config, role, port, side_port, self._monitor_url)
            yield Member(role, url, SupervisedProcess(self._spec(name, command, url, {**env, **pool.env})))

    def _spec(self, name: str, command: Sequence[str], url: str, env: Mapping[str, str]) -> ProcessSpec:
        log = self.config.run_dir / f"{name}.log"
        log.write_bytes(b"")
        return ProcessSpec(
            name=name,
            command=tuple(command),
            log=log,
            ready_url=f"{url}/health",
            env=env,
            ready_timeout_s=self.config.ready_timeout_s,
        )

    def _launch(self, members: Sequence[Member]) -> None:
        with self._polling:
            for member in members:
                self._members.append(member)  # first, so that an interrupted start is stopped too
                member.process.start()
        while any(member.process.state is not State.READY for member in members):
            self.check()
            self._closing.wait(_POLL_S)

    def _lock_run_dir(self) -> None:
        self.config.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock_file = (self.config.run_dir / "lock").open("wb")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock_file.close()
            raise ConfigError(
                f"run_dir {self.config.run_dir} is in use by another cluster; stop that one or name another folder"
            ) from None

    # --- supervision ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a process has failed for good.

        Raises:
            EngineError: naming the process and its problem, with the last lines of its log.
        """
        for member in self._members:
            process = member.process
            if process.state is State.FAILED:
                raise EngineError(
                    f"{process.spec.name} {process.problem}; the end of {process.spec.log}:\n{process.log_tail()}"
                )

    def wait(self) -> None:
        """Block until a process has failed for good; see `check`."""
        while True:
            self.check()
            self._closing.wait(_POLL_S)

    def _supervise(self) -> None:
        while not self._closing.wait(_POLL_S):
            with self._polling:
                for member in self._members:
                    member.process.poll()
                ready = self._polling_groups() - self._calmed
            for group in ready:
                lower_polling_threads(group)
            self._calmed |= ready

    def _polling_groups(self) -> set[int]:
        """Process groups whose helper threads may poll without pause; those of the embedded engine only compute."""
        if self.config.engine == "embedded":
            return set()
        engines = [member for member in self._members if member.role != "gateway"]
        return {m.process.pid for m in engines if m.process.pid and m.process.state is State.READY}

    # --- stop ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop everything, the last started first; a second Ctrl-C in here kills what is left at once."""
        try:
            self._end_supervision()
            for role in ("gateway", "decode", "prefill", "experts", "monitor"):
                self._stop_role(role)
        except KeyboardInterrupt:
            self.kill()
        finally:
            if self._lock_file:
                self._lock_file.close()

    def kill(self) -> None:
        """End every process at once."""
        self._end_supervision()
        for member in reversed(self._members):
            member.process.kill()

    def _stop_role(self, role: str) -> None:
        members = self.members(role)
        for member in members:
            member.process.request_stop()
        for member in members:
            member.process.wait_stopped()

    def _end_supervision(self) -> None:
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()


def _engine_command(
    config: ClusterConfig, role: Role, port: int, side_port: int, monitor: str | None
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Command line and environment of one engine."""
    if config.engine == "embedded":
        return embedded_command(config, role, HOST, port, side_port, monitor), {}
    return vllm_command(config, role, HOST, port), vllm_env(HOST, side_port)


def _nth(first: int, role: Role, config: ClusterConfig) -> int:
    """First port of a role: decode engines follow the prefill engines; 0 stays 0."""
    return first + config.prefill.count if first and role == "decode" else first
