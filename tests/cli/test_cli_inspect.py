import json
import sys

import pytest

from coterie.calibration import fit
from coterie.cli import main
from made_traces import domains_differ, roughly


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    trace = domains_differ(80)
    trace.save(folder / "a.trace")
    fit(trace, 3, starts=1, pairs=300).save(folder / "a.profile")
    return folder


@pytest.fixture(autouse=True)
def rough():
    with roughly():
        yield


def run(*arguments):
    """Exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    return ended.value.code


def test_a_trace_is_answered_in_words_and_tables_within_100_columns(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(files / "a.trace", "--clusters", 3) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("This trace cannot tell")  # 40 held-out requests
    assert "40 held-out requests are too few" in shown
    assert "What proves locality:" in shown
    assert "Active experts per layer and decode step, of 32" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_json_and_page_are_complete_and_the_same_each_time(files, tmp_path, capsys):
    def report(page):
        flags = ("--profile", files / "a.profile", "--seed", 4, "--json", "--html", page)
        assert run(files / "a.trace", *flags) == 0
        return capsys.readouterr().out, page.read_bytes()

    once, again = report(tmp_path / "1.html"), report(tmp_path / "2.html")
    assert once == again
    found = json.loads(once[0])
    assert (found["seed"], found["subject"]["used"], len(found["clusters"]["clusters"])) == (4, 80, 3)
    assert [(one["placement"], one["batch"]) for one in found["active"]][:3] == [
        ("random", 8),
        ("domain", 8),
        ("cluster", 8),
    ]
    assert found["active"][-1]["active"] is None
    assert len(found["use"]["share"]) == 4
    assert len(found["plot"]["projection"]["points"]) == 40


def test_a_profile_alone_is_described(files, tmp_path, capsys):
    page = tmp_path / "profile.html"
    assert run(files / "a.profile", "--html", page) == 0
    shown = capsys.readouterr().out
    assert "A profile alone cannot tell" in shown
    assert "experts (layer.expert)" in shown
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run(files / "a.profile", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["clusters"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.profile", "--clusters", 3], "is a profile; --profile and --clusters go with a trace"),
        (["a.trace", "--clusters", 3, "--profile", "a.profile"], "give one of the two"),
        (["no.trace"], "no.trace: cannot be read"),
        (["a.trace", "--html", "nowhere/out.html"], "there is no folder nowhere"),
        (["a.trace", "--html", "a.trace"], "a.trace is read by this command"),
        (["a.trace", "--profile", "a.profile", "--html", "a.profile"], "a.profile is read by this command"),
    ],
)
def test_what_cannot_be_done_is_one_message(files, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(files)
    before = (files / "a.trace").read_bytes()
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("coterie: ")
    assert message in error
    assert (files / "a.trace").read_bytes() == before


def test_a_page_without_matplotlib_is_refused_before_anything_is_measured(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(files / "no.trace", "--html", files / "out.html") == 1
    assert "pip install 'coterie[report]'" in capsys.readouterr().err
