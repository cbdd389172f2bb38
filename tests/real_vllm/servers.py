"""Real vLLM servers of one test, and the paths they need."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.up.ports import PortChooser
from coterie.up.priority import lower_polling_threads
from coterie.up.processes import ProcessSpec, State, SupervisedProcess
from coterie.up.vllm_command import vllm_env

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny-moe"
HOST = "127.0.0.1"


@contextmanager
def vllm_server(engine_env: Path, folder: Path, model: Path, transfer: str, *arguments: str) -> Iterator[str]:
    """One server, ready; its URL.  The process and everything below it is gone afterwards."""
    ports = PortChooser(os.getpid())
    (port,), (side,) = ports.ports(0, 1, "engine"), ports.ports(0, 1, "side channel")
    url = f"http://{HOST}:{port}"
    spec = ProcessSpec(
        name=folder.name,
        command=(
            *(str(engine_env / "bin" / "vllm"), "serve", str(model), "--served-model-name", "tiny"),
            *("--host", HOST, "--port", str(port), "--max-model-len", "1024", "--enforce-eager"),
            *("--dtype", "float32", "--kv-transfer-config", transfer, *arguments),
        ),
        log=folder / "server.log",
        ready_url=f"{url}/health",
        env={**vllm_env(HOST, side), "HF_HUB_OFFLINE": "1"},
    )
    process = SupervisedProcess(spec)
    process.start()
    try:
        while process.state is not State.READY:
            process.poll()
            assert process.state is not State.FAILED, f"{process.problem}\n{process.log_tail()}"
            time.sleep(0.25)
        lower_polling_threads(process.pid)
        yield url
    finally:
        process.stop()
