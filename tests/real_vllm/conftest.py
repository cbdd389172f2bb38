"""What the tests in this folder share: starting vLLM, or importing torch, takes longer than most tests."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from servers import ROOT, TINY

from coterie.up.cluster import Cluster
from coterie.up.config import ClusterConfig, PoolConfig

POOL_ARGUMENTS = (
    "--block-size", "32", "--num-gpu-blocks-override", "320", "--enable-prompt-tokens-details", "--enable-scale-out"
)  # fmt: skip
POOL_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}  # shows its settings


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session", autouse=True)
def _scratch():
    """A folder for the files and sockets by which vLLM's processes meet, and which it leaves there when it ends."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def environment() -> Path:
    """The environment with vLLM; tests fail, and say what to run, where it is missing."""
    env = Path(os.environ.get("COTERIE_VLLM_ENV") or ROOT / ".venv-vllm").absolute()
    if not (env / "bin" / "vllm").exists():
        pytest.fail(f"there is no vLLM in {env}: run `make vllm-env`", pytrace=False)
    return env


@pytest.fixture(scope="session")
def engine_env(environment) -> Path:
    """The same with this very plugin."""
    env = environment
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
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        env["PYTHONPATH"] = str(ROOT / "src")  # what is installed there may be older, the plugin excepted
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env)
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    return run


@pytest.fixture(scope="session")
def nixl(environment, tmp_path_factory):
    """NIXL of the engine's environment, and nothing else of it, for this process and those that it starts."""
    packages = next(environment.glob("lib/python3*/site-packages"))
    folder = tmp_path_factory.mktemp("nixl")
    for path in packages.glob("nixl*"):
        (folder / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


@pytest.fixture(scope="session")
def cluster(engine_env, tmp_path_factory):
    """1P2D behind no gateway: the prefill server counts, the decode servers run vLLM's own connector alone."""
    config = ClusterConfig(
        model=str(TINY),
        served_model_name="tiny",
        prefill=PoolConfig(1, POOL_ARGUMENTS, POOL_ENV),
        decode=PoolConfig(2, POOL_ARGUMENTS, POOL_ENV),
        engine_env=engine_env,
        run_dir=tmp_path_factory.mktemp("cluster"),
    )
    with Cluster(config) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def checkpoints(engine_python, tmp_path_factory) -> Path:
    """A folder with a random checkpoint of each kind that `make_checkpoints.py` knows, by name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    engine_python("make_checkpoints.py", folder, TINY)
    return folder


@pytest.fixture(scope="session")
def built(engine_python, tmp_path_factory) -> tuple[Path, dict[str, list]]:
    """A folder with a config of each MoE architecture, and what transformers builds of it; see `moe_layers.py`."""
    folder = tmp_path_factory.mktemp("built")
    return folder, json.loads(engine_python("moe_layers.py", folder).splitlines()[-1])
