"""Real vLLM servers for the tests in this folder, one set per module."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coterie.up.ports import PortChooser
from coterie.up.processes import ProcessSpec, State, SupervisedProcess
from coterie.up.vllm_command import vllm_env

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny-moe"
HOST = "127.0.0.1"


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def engine_env() -> Path:
    """The environment with vLLM and this very plugin; tests fail, and say what to run, where it is missing."""
    env = Path(os.environ.get("COTERIE_VLLM_ENV") or ROOT / ".venv-vllm").absolute()
    if not (env / "bin" / "vllm").exists():
        pytest.fail(f"there is no vLLM in {env}: run `make vllm-env`", pytrace=False)
    installed = next(iter(env.glob("lib/python3*/site-packages/coterie")), None)
    if installed is None or not same_source(ROOT / "src" / "coterie", installed):
        pytest.fail(f"{env} holds another plugin than src/: run `make vllm-env`", pytrace=False)
    return env


def same_source(source: Path, installed: Path) -> bool:
    files = [Path(f"{name}.py") for name in ("errors", "core", "wire")]
    files += [path.relative_to(source) for path in (source / "vllm_plugin").glob("*.py")]
    return all((installed / file).exists() and filecmp.cmp(source / file, installed / file, False) for file in files)


@pytest.fixture(scope="session")
def engine_python(engine_env):
    """Run a script of this folder with the engine's Python, as transformers and torch live there."""

    def run(script: str, *arguments: str | Path) -> str:
        command = [engine_env / "bin" / "python", Path(__file__).parent / "inside" / script, *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env)
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    return run


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
        yield url
    finally:
        process.stop()


@pytest.fixture(scope="session")
def leftovers():
    """Names in /dev/shm that coterie could have left."""

    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("coterie")}

    return names


@pytest.fixture(scope="session")
def sliding_window_model(engine_python, tmp_path_factory) -> Path:
    """A random GPT-OSS checkpoint: sliding-window and full attention in turn, so two KV groups."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    engine_python("make_gpt_oss.py", folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return folder
