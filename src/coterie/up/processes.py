"""One supervised process: its own process group, log file, readiness probe, bounded restarts, complete stop.

    STARTING ──ready──> READY ──ended──> BACKOFF ──delay──> STARTING
        │                  │                │
        │ never was ready  │ stop           │ too often
        ▼                  ▼                ▼
      FAILED            STOPPED           FAILED

The process is a state machine that somebody polls; it has no thread of its own and reads time from a clock.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from coterie.clock import Clock, SystemClock
from coterie.errors import EngineError

_KEEPER = Path(__file__).with_name("keeper.py")
_PROBE_TIMEOUT_S = 2.0
_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 30.0
_STEADY_S = 60.0
_LOG_TAIL_BYTES = 64 << 10

Probe = Callable[[str], bool]
"""Whether the server behind a URL is ready."""


class State(Enum):
    """Where a process is in its life."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run and how.

    Attributes:
        name: unique name, for people.
        command: program and arguments.
        log: file that stdout and stderr are appended to.
        ready_url: URL that answers 200 once the process is ready.
        env: variables added to this process's own environment.
        ready_timeout_s: the longest that a start may take.
        grace_s: time between SIGTERM and SIGKILL.
        max_restarts: restarts in a row, each without a minute of readiness in between, before giving up.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 600.0
    grace_s: float = 15.0
    max_restarts: int = 5


def http_ready(url: str) -> bool:
    """Whether `url` (plain HTTP) answers 200 now."""
    where = urlsplit(url)
    # http.client, since it is polled several times a second and a client with TLS costs 30 ms to build
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", where.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class SupervisedProcess:
    """A process under a keeper (see `keeper`); `poll` moves its state machine, from one thread.

    Attributes:
        spec: what it runs.
        state: where it is in its life.
        restarts: how often it was started again.
        problem: why it failed; None unless `state` is FAILED.
    """

    def __init__(self, spec: ProcessSpec, *, clock: Clock | None = None, probe: Probe = http_ready) -> None:
        self.spec = spec
        self.state = State.STOPPED
        self.restarts = 0
        self.problem: str | None = None
        self._clock = SystemClock() if clock is None else clock
        self._probe = probe
        self._keeper: subprocess.Popen[bytes] | None = None
        self._since_s = 0.0  # when the present state began
        self._losses = 0  # ends in a row without a steady minute
        self._was_ready = False
        self._last_end = ""

    @property
    def pid(self) -> int | None:
        """Leader of the process group (signals sent to it reach the command); None while nothing runs."""
        return self._keeper.pid if self._keeper else None

    def start(self) -> None:
        """Launch the command.

        Raises:
            EngineError: the program cannot be run.
        """
        program = Path(self.spec.command[0])
        if not os.access(program, os.X_OK):
            raise EngineError(f"{self.spec.name}: {program} is not an executable file")
        with self.spec.log.open("ab") as log:
            self._keeper = subprocess.Popen(  # noqa: S603 - the operator's own command line
                [sys.executable, "-IS", str(_KEEPER), str(self.spec.grace_s), *self.spec.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.spec.env},
                process_group=0,  # no session: Linux weighs priorities within one, see priority.py
                bufsize=0,
            )
        self._enter(State.STARTING)

    def poll(self) -> None:
        """Notice what happened since the last call: ready, ended, too slow, time to start again."""
        if self.state in (State.STARTING, State.READY) and self._collect_end():
            self._lost()
        elif self.state is State.STARTING:
            self._check_ready()
        elif self.state is State.BACKOFF and self._clock.now() - self._since_s >= self._backoff_s():
            self._start_again()

    def _start_again(self) -> None:
        self.restarts += 1
        try:
            self.start()
        except (EngineError, OSError) as error:
            self._fail(f"cannot be started again: {error}")

    def _check_ready(self) -> None:
        if self._probe(self.spec.ready_url):
            self._was_ready = True
            self._enter(State.READY)
        elif self._clock.now() - self._since_s > self.spec.ready_timeout_s:
            self.kill()
            self._fail(f"not ready after {self.spec.ready_timeout_s:g} s")

    def _lost(self) -> None:
        # a long steady run forgives earlier losses
        steady = self.state is State.READY and self._clock.now() - self._since_s >= _STEADY_S
        self._losses = 1 if steady else self._losses + 1
        if not self._was_ready:
            self._fail(f"ended before it was ready ({self._last_end})")
        elif self._losses > self.spec.max_restarts:
            self._fail(f"ended too often: {self._losses} times in a row ({self._last_end})")
        else:
            self._enter(State.BACKOFF)

    def _backoff_s(self) -> float:
        return float(min(_FIRST_BACKOFF_S * 2 ** (self._losses - 1), _LONGEST_BACKOFF_S))

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self._enter(State.FAILED)

    def _enter(self, state: State) -> None:
        self.state = state
        self._since_s = self._clock.now()

    # --- ending --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask for a stop, and wait until every process below is gone."""
        self.request_stop()
        self.wait_stopped()

    def kill(self) -> None:
        """End every process below without grace."""
        self._wish(b"k")
        self.wait_stopped()

    def request_stop(self) -> None:
        """Ask for a stop (SIGTERM, SIGKILL after the grace) without waiting for it."""
        self._wish(b"s")

    def wait_stopped(self) -> None:
        """Wait until every process below is gone; a stop or kill was asked for."""
        if self._keeper:
            self._collect_end(block=True)
        if self.state is not State.FAILED:
            self._enter(State.STOPPED)

    def _wish(self, wish: bytes) -> None:
        if self._keeper and self._keeper.stdin:
            with contextlib.suppress(BrokenPipeError):  # the keeper has ended by itself
                self._keeper.stdin.write(wish)

    def _collect_end(self, *, block: bool = False) -> bool:
        """Whether the keeper ended; if so, nothing of its group is left."""
        if self._keeper is None:
            return True
        how = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        if os.waitid(os.P_PID, self._keeper.pid, how) is None:
            return False
        # Only a killed keeper leaves anything.  Not yet reaped, it still owns the group's number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        self._keeper.communicate()
        self._last_end = _describe_end(self._keeper.returncode)
        self._keeper = None
        return True

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        with self.spec.log.open("rb") as file:
            file.seek(max(0, self.spec.log.stat().st_size - _LOG_TAIL_BYTES))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])


def _describe_end(status: int) -> str:
    """Of a keeper: it passes on its command's status, shell style, unless it was killed itself."""
    try:
        return f"killed by {signal.Signals(-status if status < 0 else status - 128).name}"
    except ValueError:
        return f"exit status {status}"


def group_cpu_s(group: int) -> float:
    """CPU seconds (user and system) that the living processes of a group have used, from `/proc`."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
