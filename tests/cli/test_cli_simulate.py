import json
from dataclasses import replace

import pytest

from coterie.calibration import fit
from coterie.cli import main
from made_traces import domains_differ


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulate")
    trace = domains_differ(80)
    trace.select(range(40)).save(folder / "a.trace")
    replace(trace, decode_ids=None).save(folder / "counts.trace")
    fit(trace.select(range(40, 80)), 3, starts=1, pairs=300).save(folder / "other.profile")
    fit(trace.select(range(40)), 3, starts=1, pairs=300).save(folder / "same.profile")
    (folder / "steps.csv").write_text("requests,active_experts,step_ms\n1,10,1.1\n8,10,1.8\n1,90,1.9\n8,90,2.6\n")
    return folder


@pytest.fixture(autouse=True)
def inside(files, monkeypatch):
    monkeypatch.chdir(files)


def run(*arguments, trace="a.trace"):
    """Exit status of the command."""
    fixed = ("--workload", trace, "--topology", "2P3D", "--duration-s", 1)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *map(str, fixed), *map(str, arguments)])
    return ended.value.code


def test_policies_are_compared_in_a_table_within_100_columns(capsys):
    assert run("--rate", 30, "--policies", "round_robin,domain,locality", "--profile", "other.profile") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2P3D, made-up (3 layers x 32 experts, top-2), 40 recorded requests")
    assert "those of Qwen3-30B-A3B on an MI300X" in shown
    assert "very requests" not in shown
    rows = [line.split()[:2] for line in shown.splitlines() if line.startswith("  30 ")]
    assert rows == [["30", "round_robin"], ["30", "domain"], ["30", "locality"]]
    assert max(map(len, shown.splitlines())) <= 100


def test_rows_as_json_are_the_same_each_time(capsys):
    def rows(*flags):
        assert run("--rate", 20, "--rate", 40, "--policies", "least_load,random", "--json", *flags) == 0
        return capsys.readouterr().out

    once = rows()
    assert once == rows()
    assert once != rows("--seed", 1)
    found = json.loads(once)["rows"]
    assert [(row["policy"], row["rate"]) for row in found] == [
        ("least_load", 20.0), ("random", 20.0), ("least_load", 40.0), ("random", 40.0)
    ]  # fmt: skip
    assert {"tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "active_experts_mean"} < found[0].keys()
    assert found[2]["requests"] > found[0]["requests"] > 0


def test_step_times_are_fitted_to_measured_steps(capsys):
    assert run("--rate", 30, "--steps", "steps.csv", "--output-tokens", 30) == 0
    out, error = capsys.readouterr()
    # 1.1 = f + r + 10 e, 1.8 = f + 8 r + 10 e, 1.9 = f + r + 90 e: r = 0.1 ms, e = 0.01 ms, f = 0.9 ms
    assert "step: 0.9 ms + 100 us x requests + 10 us x active experts of all layers; mean error 0.0%" in error
    assert "MI300X" not in out


def test_what_weakens_the_figures_is_said(capsys):
    assert run("--rate", 30, "--policies", "locality", "--profile", "same.profile") == 0
    assert "fitted to these very requests" in capsys.readouterr().out
    assert run("--rate", 30, trace="counts.trace") == 0
    assert "Active experts are expected values" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--policies", "fastest"], 2, "'fastest' is none of round_robin"),
        (["--policies", "locality"], 1, "locality needs --profile"),
        (["--policies", "locality", "--profile", "other.profile", "--topology", "2P4D"], 1, "3 centroids for 4 decode"),
        (["--topology", "2D"], 1, "'2D' is not like 8P16D"),
        (["--rate", "-3"], 1, "rate_per_s must be above zero, got -3"),
        (["--steps", "a.trace"], 1, "a.trace: "),
        (["--workload", "no.trace"], 1, "no.trace"),
    ],
)
def test_what_cannot_be_simulated_is_one_message(arguments, status, message, capsys):
    assert run("--rate", 30, *arguments) == status
    assert message in capsys.readouterr().err
