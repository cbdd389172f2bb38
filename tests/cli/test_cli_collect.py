"""The command line of `coterie collect`; what it does is shown in test_collect."""

import json

import pytest

from coterie import cli
from coterie.activations import TraceRecord, build_trace
from coterie.cli import collect as collect_module
from coterie.core import ExpertCounts, ModelGeometry


@pytest.fixture
def collected(monkeypatch):
    """Options that reached the collection, which returns a trace of one request."""
    import numpy as np

    seen = []

    async def run_collect(source, options, reporter):
        seen.append(options)
        reporter.begin(3, 2)
        reporter.advance()
        geometry = ModelGeometry(1, 4, 1)
        prompt = ExpertCounts(geometry, np.array([[2, 0, 0, 0]], dtype=np.uint8), tokens=5, covered=2)
        output = ExpertCounts(geometry, np.array([[0, 3, 0, 0]], dtype=np.uint8), tokens=3, covered=3)
        return build_trace("tiny", [TraceRecord(prompt, output, 4, "0" * 32)])

    monkeypatch.setattr(collect_module, "run_collect", run_collect)
    return seen


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["collect", *arguments])
    return ended.value.code


REQUIRED = ("--server", "http://x", "--prompts", "p.jsonl", "--output", "t.trace")


def test_json_goes_to_stdout_and_progress_to_stderr(collected, capsys):
    assert run(*REQUIRED, "--json", "--max-tokens", "7") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "trace": "t.trace",
        "model": "tiny",
        "geometry": "1 layers x 4 experts, top-1",
        "requests": 1,
        "partly_covered": 1,
        "prompt_tokens": 5,
        "output_tokens": 4,
    }
    assert "2 of 3 requests were finished by an earlier run" in err
    assert collected[0].max_tokens == 7


def test_an_error_is_one_message_on_stderr(capsys, tmp_path):
    options = ("--server", "http://x", "--prompts", str(tmp_path / "none"), "--output", str(tmp_path / "t"))
    assert run(*options) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"coterie: {tmp_path}/none: cannot be read: No such file or directory" in err


def test_one_output_token_is_refused(capsys):
    assert run(*REQUIRED, "--max-tokens", "1") == 2
    assert "--max-tokens" in capsys.readouterr().err
