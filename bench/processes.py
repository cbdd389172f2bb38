"""Processes that benchmarks start, and what they cost."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


@contextlib.contextmanager
def coterie(*arguments: str | Path) -> Iterator[tuple[str, int]]:
    """URL and id of a coterie process that has said where it serves."""
    command = [sys.executable, "-m", "coterie", *map(str, arguments)]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[^\s,;]+", process.stdout.readline())
            if found is None:
                raise SystemExit(f"{' '.join(command)}: did not start")
            yield found[0], process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves at a port."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_until_served(process, port, log)
            yield process
        finally:
            process.terminate()
            process.wait()


def _wait_until_served(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            if "--processes" not in process.args or log.read_bytes().rpartition(b"mode ")[2].count(b"admin "):
                return  # a gateway says where it is once all of its processes serve
        time.sleep(0.1)
    raise SystemExit(f"{process.args} did not serve; see {log}")


def cpu_s(process: int) -> float:
    """CPU seconds of a process's living threads, to the nanosecond."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text(encoding="utf-8").split()[0]) for thread in threads) / 1e9


def family_cpu_s(process: int) -> float:
    """CPU seconds of a process and its living children, ended threads included, to the clock's tick."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if process in (int(stat.parent.name), int(fields[1])):
                total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total
