"""Two prefill and three decode engines, each behind a fault proxy, and their gateway: all real processes.

with FaultCluster(folder) as cluster:
    cluster.ask("Once upon a time")
    cluster.engines["decode"][0].kill()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from fault_proxy import FaultProxy, ProxyLoop, Trap

import coterie
from coterie.engines.embedded.kv import PREFIX
from coterie.shm import FOLDER
from coterie.up.ports import PortChooser
from waiting import wait_until

ROOT = Path(__file__).parents[2]
SOURCE = Path(coterie.__file__).parents[1]
MODEL = ROOT / "models" / "coterie-tiny"
LEASE_S = 6.0
"""How long a prefill engine keeps KV that nobody takes."""

PATIENCE_S = 2.0
"""How long the tests' gateway waits for a byte of a worker."""

GATEWAY = {
    "prefill_policy": "round_robin",
    "decode_policy": "round_robin",
    "prefill_timeout_s": PATIENCE_S,
    "first_byte_timeout_s": PATIENCE_S,
    "idle_timeout_s": PATIENCE_S,
    "connect_timeout_s": 1.0,
    "breaker_open_s": 0.25,
    "breaker_most_open_s": 0.5,
    "health_interval_s": 0.5,
    "health_timeout_s": 1.0,
    "client_stall_timeout_s": 2.0,
    "max_body_bytes": 1 << 20,
    "log_requests": True,
}
ROLES = ("prefill", "decode")
PROMPTS = ("Once upon a time", "def main(args):\n    ", "The king said unto", "SELECT name FROM", "Es war einmal")
TOKENS = 24
_START_S = 120.0


class Process:
    """A server process with a log of its own.

    Attributes:
        url: where it serves.
        pid: of the running process.
    """

    def __init__(self, arguments: list[str], url: str, log: Path) -> None:
        self.url = url
        self.log = log
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Launch it, without waiting; what may still run is killed first."""
        self.kill()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "coterie", *self._arguments], stdout=log, stderr=log, env=environment
            )

    def wait_ready(self) -> None:
        """Wait until it serves."""
        wait_until(self._ready, f"the start of {self.log.stem}", _START_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, as a crash does; nothing if it is gone already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, within_s: float = 20.0) -> int:
        """End it as an operator does; its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.log.stem} ended:\n{self.log.read_text()[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=1, trust_env=False).status_code == 200
        return False


class FaultEngine:
    """An embedded engine and the proxy through which the gateway reaches it.

    Attributes:
        name: as the gateway calls it.
        role: "prefill" or "decode".
        process: the engine itself.
        proxy: in front of it.
        files: shared memory of its processes, that of the last one last.
    """

    def __init__(self, name: str, role: str, ports: PortChooser, folder: Path, loop: ProxyLoop) -> None:
        port, kv_port = ports.ports(0, 2, name)
        self.name = name
        self.role = role
        self.process = Process(_engine_arguments(role, port, kv_port, folder), f"http://127.0.0.1:{port}",
                               folder / f"{name}.log")  # fmt: skip
        self.proxy = FaultProxy(name, port, loop)
        self.files: list[Path] = []

    def wait_ready(self) -> None:
        """Wait until its new process serves, then let the gateway reach it."""
        self.process.wait_ready()
        maps = Path(f"/proc/{self.process.pid}/maps").read_text().split()
        self.files.append(next(Path(word) for word in maps if word.startswith(f"{FOLDER}/{PREFIX}")))
        self.proxy.open()

    def kill(self) -> None:
        """As a crash or the kernel's OOM killer ends it."""
        self.proxy.cut()
        self.process.kill()

    def restart(self) -> None:
        """Start it again, on the same ports."""
        self.process.start()
        self.wait_ready()

    def metric(self, name: str) -> float:
        """Sum of a metric of the engine over its labels."""
        lines = httpx.get(f"{self.process.url}/metrics", timeout=5, trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def holds_nothing(self) -> bool:
        """Whether no request, no lease and no block is left."""
        names = ("vllm:num_requests_running", "coterie:kv_leases", "vllm:kv_cache_usage_perc")
        return not any(self.metric(name) for name in names)


def _engine_arguments(role: str, port: int, kv_port: int, folder: Path) -> list[str]:
    where = ["--port", str(port), "--kv-port", str(kv_port), "--weights-dir", str(folder / "weights")]
    how = ["--served-model-name", "tiny", "--role", role, "--kv-blocks", "400", "--kv-lease", str(LEASE_S)]
    return ["engine", str(MODEL), *where, *how]


@dataclass(frozen=True)
class Answer:
    """What a client got.

    Attributes:
        status: of the reply; 0 where the connection ended before one.
        text: of all events, or of the whole reply.
        error: code or type of the error, in a reply or in an event; None without one.
        whole: whether it came to its proper end.
        seconds: from the request to the end.
        gap_s: the longest pause without a byte.
    """

    status: int
    text: str
    error: str | None
    whole: bool
    seconds: float
    gap_s: float


class FaultCluster:
    """The whole; a context manager.

    Attributes:
        engines: by role.
        gateway: its process.
        admin_url: where the gateway's admin side is.
    """

    def __init__(self, folder: Path, *, prefill: int = 2, decode: int = 3, **settings: Any) -> None:
        self._loop = ProxyLoop()
        self._ports = PortChooser(os.getpid())
        self._folder = folder
        counts = {"prefill": prefill, "decode": decode}
        self.engines = {role: [self._engine(role, i) for i in range(counts[role])] for role in ROLES}
        port, admin_port = self._ports.ports(0, 2, "gateway")
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._settings = {**GATEWAY, **settings, "port": port, "admin_port": admin_port}
        file = folder / "gateway.yaml"
        self.gateway = Process(["serve", "--config", str(file)], f"http://127.0.0.1:{port}", folder / "gateway.log")

    def _engine(self, role: str, number: int) -> FaultEngine:
        return FaultEngine(f"{role}-{number}", role, self._ports, self._folder, self._loop)

    @property
    def all_engines(self) -> list[FaultEngine]:
        """Prefill engines, then decode engines."""
        return [*self.engines["prefill"], *self.engines["decode"]]

    def engine(self, name: str) -> FaultEngine:
        """The engine of a name."""
        return next(engine for engine in self.all_engines if engine.name == name)

    @contextlib.contextmanager
    def lying_in_wait(self, role: str, trap: Trap) -> Iterator[None]:
        """Set a trap for the next request at any engine of a role."""
        proxies = [engine.proxy for engine in self.engines[role]]
        for proxy in proxies:
            proxy.trap = trap
        try:
            yield
        finally:
            for proxy in proxies:
                proxy.trap = None

    def __enter__(self) -> FaultCluster:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._loop)
            undo.callback(self._stop)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._loop.__exit__()

    def _start(self) -> None:
        for engine in self.all_engines:
            engine.process.start()
        for engine in self.all_engines:
            engine.wait_ready()
        urls = {role: [engine.proxy.url for engine in self.engines[role]] for role in ROLES}
        (self._folder / "gateway.yaml").write_text(yaml.safe_dump({**self._settings, **urls}))
        self.gateway.start()
        self.gateway.wait_ready()

    def _stop(self) -> None:
        for process in (self.gateway, *(engine.process for engine in self.all_engines)):
            process.kill()
        for engine in self.all_engines:
            engine.proxy.cut()

    # --- what clients do -----------------------------------------------------------------------------

    def ask(self, prompt: str, tokens: int = TOKENS, *, stream: bool = True, **more: Any) -> Answer:
        """A greedy completion through the gateway."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return ask(self.gateway.url, {**body, "stream": stream, **more})

    def ask_all(self, prompts: list[str], tokens: int = TOKENS) -> list[Answer]:
        """Several at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))

    # --- what is left --------------------------------------------------------------------------------

    def workers(self) -> dict[str, dict[str, Any]]:
        """The gateway's own view of its workers, by name."""
        return {row["name"]: row for row in self.admin("/workers")["workers"]}

    def admin(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """What the gateway's admin side answers."""
        return httpx.request(method, self.admin_url + path, json=body, timeout=20, trust_env=False).json()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of those samples of a metric of the gateway that have these labels."""
        lines = httpx.get(f"{self.admin_url}/metrics", timeout=5, trust_env=False).text.splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples if all(label in line for label in wanted))

    def all_available(self) -> bool:
        """Whether the gateway would use every worker."""
        return all(row["available"] for row in self.workers().values())

    def nothing_held(self) -> bool:
        """Whether the gateway counts no load, and no engine holds a request or KV."""
        idle = all(row["requests"] == row["tokens"] == 0 for row in self.workers().values())
        return idle and all(engine.holds_nothing() for engine in self.all_engines)

    def stranded_files(self) -> list[Path]:
        """Shared memory of engines that were killed: the next start of one removes it."""
        return [file for engine in self.all_engines for file in engine.files[:-1] if file.exists()]


def ask(url: str, body: dict[str, Any], *, timeout_s: float = 30.0) -> Answer:
    """Post a completion, and read its reply whatever becomes of it."""
    start_s = last_s = time.monotonic()
    status, gap_s, data = 0, 0.0, b""
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.Client(timeout=timeout_s, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as reply,
    ):
        status = reply.status_code
        for part in reply.iter_raw():
            data += part
            gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
    text, error, whole = _read(status, data, stream=body["stream"])
    seconds = time.monotonic() - start_s
    return Answer(status, text, error, whole, seconds, max(gap_s, time.monotonic() - last_s))


def _read(status: int, data: bytes, *, stream: bool) -> tuple[str, str | None, bool]:
    """Text, error, and whether the reply has its proper end."""
    if status != 200 or not stream:
        return _read_whole(status, data)
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    whole, text = bool(events) and events[-1] == b"[DONE]", ""
    for event in events:
        if event == b"[DONE]":
            continue
        try:
            document = json.loads(event)
        except ValueError:
            return text, None, False
        if "error" in document:
            return text, _name(document["error"]), whole
        text += "".join(choice["text"] for choice in document["choices"])
    return text, None, whole


def _read_whole(status: int, data: bytes) -> tuple[str, str | None, bool]:
    try:
        document = json.loads(data)
    except ValueError:
        return "", None, False
    if status != 200:
        return "", _name(document["error"]), True
    return document["choices"][0]["text"], None, True


def _name(error: dict[str, Any]) -> str:
    return str(error.get("code") or error["type"])
