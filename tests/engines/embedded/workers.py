"""Real worker processes for tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from coterie.cli import main
from coterie.engines.embedded.kv import PREFIX

TINY = Path(__file__).parents[3] / "models" / "coterie-tiny"
SMALL = ("--kv-blocks", "400", "--max-num-seqs", "16", "--max-batched-tokens", "64")

HTTP = httpx.Client(timeout=60, trust_env=False, limits=httpx.Limits(max_keepalive_connections=3))
"""One for all: to make one costs 30 ms.  It keeps few connections, for tests that wait until they are closed."""


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["pytest", "httpx", "coterie.cli.engine"])
"""Workers are forked from one process that has imported all they need: most of the CPU time that a start takes."""


def _work(out: Connection, arguments: list[str], enter: Callable[[], None] | None) -> None:
    if enter:
        enter()
    os.dup2(out.fileno(), 1)
    main(["engine", *arguments])


class WorkerProcess:
    """`coterie engine` on the tiny checkpoint, in a process of its own, which calls `enter` first.

    Attributes:
        http: for requests to it.
    """

    def __init__(self, weights: Path, *arguments: str, enter: Callable[[], None] | None = None) -> None:
        self.http = HTTP
        own = ("--served-model-name", "tiny", "--port", "0", "--weights-dir", str(weights), *SMALL)
        said, out = _PROCESSES.Pipe(duplex=False)
        self.process = _PROCESSES.Process(target=_work, args=(out, [str(TINY), *own, *arguments], enter), daemon=True)
        self.process.start()
        out.close()
        self._said = said
        self.url = ""

    def wait_ready(self) -> WorkerProcess:
        with open(self._said.fileno(), closefd=False) as said:
            self.url = re.search(r"http://\S+(?=,)", said.readline())[0]
        self._said.close()
        return self

    def post(self, path: str = "/v1/completions", **fields) -> httpx.Response:
        return self.http.post(self.url + path, json=fields)

    def complete(self, prompt, **fields) -> dict:
        body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        reply = self.post(prompt=prompt, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def prefill(self, prompt) -> dict:
        """The `kv_transfer_params` of a kept prompt."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        return self.complete(prompt, max_tokens=1, kv_transfer_params=asked)["kv_transfer_params"]

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1])

    @property
    def proc(self) -> Path:
        """What the kernel tells of the process."""
        return Path(f"/proc/{self.process.pid}")

    def descriptors(self) -> list[str]:
        """What its open descriptors refer to."""
        folder = self.proc / "fd"
        links = []
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed since
                links.append(os.readlink(folder / number))
        return links

    def kv_files(self) -> set[Path]:
        """Its shared memory."""
        return {Path(link) for link in self.descriptors() if PREFIX in link}

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal; its exit status, or minus the signal that ended it."""
        self.send(number)
        return self.wait()

    def wait(self) -> int:
        self.process.join(20)
        assert self.process.exitcode is not None, "it goes on"
        return self.process.exitcode


@contextlib.contextmanager
def running(weights: Path, *commands: tuple[str, ...]) -> Iterator[list[WorkerProcess]]:
    """Workers with these extra arguments, started side by side."""
    with ending([WorkerProcess(weights, *arguments) for arguments in commands]) as workers:
        yield workers


@contextlib.contextmanager
def ending(workers: list[WorkerProcess]) -> Iterator[list[WorkerProcess]]:
    """Wait until workers are ready, and end them in the end."""
    try:
        yield [worker.wait_ready() for worker in workers]
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.send(signal.SIGCONT)  # a test that failed may have left it stopped
                worker.end()
