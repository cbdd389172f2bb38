"""The command line of `coterie collect`; what it does is shown in test_collect."""

import json
from pathlib import Path

import pytest

from coterie import cli
from coterie.activations import TraceRecord, build_trace
from coterie.cli import collect as collect_module
from coterie.core import ExpertCounts, ModelGeometry
from coterie.errors import EngineError

TINY = Path(__file__).parents[2] / "models" / "coterie-tiny"


@pytest.fixture
def collected(monkeypatch):
    """Options that reached the collection, which returns a trace of one request."""
    import numpy as np

    seen = []

    async def run_collect(source, options, reporter):
        seen.append(options)
        seen.append(source)
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
        "recorded": ["counts"],
    }
    assert err == "2 of 3 requests were finished by an earlier run\n"  # no bar: this is no terminal
    assert collected[0].max_tokens == 7


@pytest.mark.parametrize(
    ("options", "records"),
    [
        ((), "counts by the plugin"),
        (("--ids",), "counts and ids by the plugin"),
        (
            ("--routed-experts", "--model-config", str(TINY)),
            "counts and ids from routed experts of 5 layers x 64 experts, top-4 (hidden layers 0, 1, 2, 3, 4)",
        ),
    ],
)
def test_options_choose_the_source(collected, capsys, options, records):
    assert run(*REQUIRED, *options) == 0
    assert collected[1].records == records
    assert "recorded         counts\n" in capsys.readouterr().out


def test_a_checkpoint_is_a_source(collected):
    assert run("--checkpoint", str(TINY), *REQUIRED[2:], "--dtype", "float32") == 0
    assert collected[1].records == f"counts, ids and gates by transformers from {TINY}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (REQUIRED[2:], "name one source: --server URL or --checkpoint FOLDER"),
        ((*REQUIRED, "--checkpoint", "x"), "name one source"),
        ((*REQUIRED, "--dtype", "float32"), "--device and --dtype are for --checkpoint"),
        (("--checkpoint", "x", *REQUIRED[2:], "--ids"), "--checkpoint always records ids"),
        ((*REQUIRED, "--ids", "--routed-experts"), "leave --ids out"),
        ((*REQUIRED, "--routed-experts"), "--routed-experts needs --model-config"),
        ((*REQUIRED, "--model-config", "x"), "--model-config is for --routed-experts"),
        ((*REQUIRED, "--routed-experts", "--model-config", "/none"), "/none: cannot be read"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_runs(collected, capsys, options, problem):
    assert run(*options) == 1
    assert problem in capsys.readouterr().err
    assert not collected


def test_an_error_is_one_message_on_stderr(capsys, tmp_path):
    options = ("--server", "http://x", "--prompts", str(tmp_path / "none"), "--output", str(tmp_path / "t"))
    assert run(*options) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"coterie: {tmp_path}/none: cannot be read: No such file or directory" in err


def test_control_characters_do_not_reach_the_terminal(capsys, monkeypatch, tmp_path):
    def fail(*_):
        raise EngineError("said \x1b[31mred\x07\nand more")

    monkeypatch.setattr(collect_module, "_source", fail)
    assert run("--server", "http://x", "--prompts", str(tmp_path), "--output", str(tmp_path / "t")) == 1
    error = capsys.readouterr().err
    assert "coterie: said \ufffd[31mred\ufffd\nand more\n" in error


def test_one_output_token_is_refused(capsys):
    assert run(*REQUIRED, "--max-tokens", "1") == 2
    assert "--max-tokens" in capsys.readouterr().err
