"""Real worker processes for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from coterie.engines.embedded.kv import PREFIX

TINY = Path(__file__).parents[3] / "models" / "coterie-tiny"
SMALL = ("--kv-blocks", "400", "--max-num-seqs", "16", "--max-batched-tokens", "64")

HTTP = httpx.Client(timeout=60, trust_env=False)
"""One for all: to make one costs 30 ms."""


class WorkerProcess:
    """`coterie engine` on the tiny checkpoint."""

    def __init__(self, weights: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "coterie", "engine", str(TINY), "--served-model-name", "tiny", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--weights-dir", str(weights), *SMALL, *arguments], stdout=subprocess.PIPE, text=True
        )
        self.url = ""

    def wait_ready(self) -> WorkerProcess:
        line = self.process.stdout.readline()
        self.url = re.search(r"http://\S+(?=,)", line)[0]
        return self

    def post(self, path: str = "/v1/completions", **fields) -> httpx.Response:
        return HTTP.post(self.url + path, json=fields)

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
        return HTTP.get(self.url + path)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)}\{{.*\}} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1])

    def descriptors(self) -> list[str]:
        """What its open descriptors refer to."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        links = []
        for number in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed since
                links.append(os.readlink(folder / number))
        return links

    def kv_files(self) -> set[Path]:
        """Its shared memory."""
        return {Path(link) for link in self.descriptors() if PREFIX in link}

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        status = self.process.wait(20)
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def running(weights: Path, *commands: tuple[str, ...]) -> Iterator[list[WorkerProcess]]:
    """Workers with these extra arguments, started side by side."""
    workers = [WorkerProcess(weights, *arguments) for arguments in commands]
    try:
        yield [worker.wait_ready() for worker in workers]
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.end()
            worker.process.stdout.close()
