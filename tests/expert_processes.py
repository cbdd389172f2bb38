"""Expert servers as processes."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class ServerOfTest:
    """A server process that has loaded its experts."""

    process: subprocess.Popen
    url: str

    def get(self, path):
        return httpx.get(f"{self.url}{path}")

    @property
    def config(self):
        return self.get("/config").json()

    @property
    def shared(self):
        """Where clients hand it requests."""
        return Path(self.config["shared_memory"])


@contextlib.contextmanager
def expert_server(checkpoint, *options, prelude="pass"):
    """`coterie experts serve`, after a line of Python; killed at the end if it still runs."""
    code = f"{prelude}; from coterie.cli import main; main()"
    command = [sys.executable, "-c", code, "experts", "serve", str(checkpoint), *options]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        yield ServerOfTest(process, line.split(" at ")[1].split(",")[0] if " at " in line else line)
    finally:
        process.kill()
        process.communicate()
