"""The whole demo, small: embedded engines, five gateways, results; and what is left when it is interrupted."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coterie.engines.embedded.kv import PREFIX
from traces import COTERIE_TINY

LABELS = {"code": "def add(a, b):\n    return a + b + ", "fr": "Choisissez le menu Format, puis la page numéro "}


@pytest.fixture
def command(tmp_path):
    """Of a demo with one prefill and two decode workers, each given 4 tokens to say a few times."""
    lines = [{"prompt": f"{text}{i}", "label": label} for label, text in LABELS.items() for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cluster = {
        "model": str(COTERIE_TINY),
        "served_model_name": "tiny",
        "engine": "embedded",
        "prefill": {"count": 1, "args": ["--kv-memory", "8"]},
        "decode": {"count": 2, "args": ["--kv-memory", "8"]},
        "run_dir": "run",
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    size = ["--requests", "4", "--concurrency", "4", "--max-tokens", "4", "--rounds", "1"]
    files = ["--cluster", "cluster.yaml", "--calibrate", "prompts.jsonl", "--serve", "prompts.jsonl"]
    return [sys.executable, "-m", "coterie", "demo", *files, *size, "--json", "result.json"]


def members(mark):
    """Living processes that inherited this environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:  # it ended since it was listed
            continue
    return found


@pytest.mark.slow
def test_the_demo_measures_every_policy_and_leaves_nothing_but_its_result(command, tmp_path):
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rows"]) == 2 * 5
    for row in result["rows"]:
        assert row["outputs_equal"]
        assert row["errors"] == 0
        assert row["tpot_p50_ms"] > 0
        assert 1 <= row["experts_per_token"] <= 4.001  # top-4, and at most 4 requests in a step
    assert "Outputs: equal under every policy, token by token (40 requests)." in done.stdout
    said = done.stderr.splitlines()  # no terminal: lines, neither a table nor bars
    assert "decode-1: ready" in {line.partition(" http")[0] for line in said}
    assert said[said.index("collecting") :][:5] == [
        "collecting", "fitting", "starting gateways", "warming up prefill", "serving"
    ]  # fmt: skip
    assert said[-1] == "serving 1.1 skewed locality"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "prompts.jsonl", "result.json"]


def shared_memory(pids):
    """Segments that these processes hold."""
    held = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            held.add(link.readlink())
    return {path for path in held if path.name.startswith(PREFIX)}


@pytest.mark.parametrize(
    ("number", "moment", "segments"),
    [
        (signal.SIGTERM, "decode-1: starting", 0),
        pytest.param(signal.SIGINT, "starting gateways", 3, marks=pytest.mark.slow),
    ],
)  # scripts/interrupt_demo.py tries many more
def test_an_interrupted_demo_leaves_nothing_behind(command, tmp_path, number, moment, segments):
    mark = f"COTERIE_DEMO_TEST={os.getpid()}-{moment}"
    environment = {**os.environ, **dict([mark.split("=")])}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - background jobs have it ignored
    ) as demo:
        assert any(line.startswith(moment) for line in demo.stderr), "it ended before"
        held = shared_memory(members(mark))
        assert len(held) == segments
        demo.send_signal(number)
        demo.communicate(timeout=60)
        assert demo.returncode != 0
    assert members(mark) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "prompts.jsonl"]
    assert not any(path.exists() for path in held)
