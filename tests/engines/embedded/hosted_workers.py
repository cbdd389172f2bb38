"""Workers on two hosts."""

from __future__ import annotations

import functools
from pathlib import Path

import httpx
from workers import WorkerProcess

from coterie.shm import FOLDER
from network_hosts import Host, enter


class HostedWorker(WorkerProcess):
    """A worker on a host."""

    def __init__(self, weights: Path, host: Host, *arguments: str) -> None:
        super().__init__(weights, "--kv-host", host.address, *arguments, enter=functools.partial(enter, host.name))
        self.http = httpx.Client(timeout=60, trust_env=False)
        self.host = host

    def post(self, path: str = "/v1/completions", **fields) -> httpx.Response:
        return self.host.call(super().post, path, **fields)

    def get(self, path: str) -> httpx.Response:
        return self.host.call(super().get, path)

    def wait(self) -> int:
        self.http.close()
        return super().wait()

    @property
    def shared_memory(self) -> Path:
        """Its `/dev/shm`, as seen from here."""
        return self.proc / "root" / FOLDER.lstrip("/")
