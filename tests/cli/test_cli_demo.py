"""The folder that a demo runs in."""

import contextlib

import pytest

from coterie.cli.demo import scratch
from coterie.errors import EngineError
from coterie.up.config import load_cluster_config


@pytest.fixture
def config(tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "model: .\nserved_model_name: tiny\nengine: embedded\nprefill: {count: 1}\ndecode: {count: 1}\nrun_dir: run\n"
    )
    return load_cluster_config(tmp_path / "cluster.yaml", engine_env=tmp_path)


def fill(folder):
    """What engines write there: logs, and weights of up to a gigabyte."""
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "weights-2048.safetensors").touch()
    (folder / "decode-0.log").touch()


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, EngineError("decode-0 ended before it was ready")])
def test_only_an_error_leaves_anything_there_and_that_is_its_logs(config, end):
    with contextlib.suppress(EngineError, KeyboardInterrupt), scratch(config) as own:
        fill(own.run_dir)
        if end:
            raise end
    left = [path.name for path in config.run_dir.rglob("*") if path.is_file()]
    assert left == (["decode-0.log"] if isinstance(end, EngineError) else [])
    assert config.run_dir.exists() == bool(left)
