"""One vLLM server outside a cluster, for tests and benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.errors import EngineError
from coterie.up.ports import PortChooser
from coterie.up.priority import lower_polling_threads
from coterie.up.processes import ProcessSpec, State, SupervisedProcess
from coterie.up.vllm_command import serve_command, vllm_env

_HOST = "127.0.0.1"
_POLL_S = 0.25


@contextmanager
def vllm_server(
    engine_env: Path, model: str | Path, transfer: str, log: Path, *arguments: str
) -> Iterator[tuple[str, SupervisedProcess]]:
    """A ready server and its URL; nothing of it is left afterwards.

    Args:
        engine_env: environment that holds vLLM.
        model: checkpoint, served under the name `tiny`.
        transfer: JSON of `--kv-transfer-config`.
        log: file for its output.
        arguments: further arguments of `vllm serve`.

    Raises:
        EngineError: it ended before it was ready; with the end of its log.
    """
    ports = PortChooser(os.getpid())
    (port,), (side,) = ports.ports(0, 1, "engine"), ports.ports(0, 1, "side channel")
    url = f"http://{_HOST}:{port}"
    command = serve_command(engine_env, str(model), "tiny", _HOST, port, transfer, arguments)
    env = {**vllm_env(_HOST, side), "HF_HUB_OFFLINE": "1"}
    process = SupervisedProcess(ProcessSpec("server", command, log, f"{url}/health", env))
    process.start()
    try:
        while process.state is not State.READY:
            process.poll()
            if process.state is State.FAILED:
                raise EngineError(f"the server {process.problem}; the end of {log}:\n{process.log_tail()}")
            time.sleep(_POLL_S)
        assert process.pid is not None
        lower_polling_threads(process.pid)
        yield url, process
    finally:
        process.stop()
