import json
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.calibration import fit
from coterie.cli import main
from coterie.routing import DECODE_POLICIES, make_policy
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
    fixed = ["--workload", trace, "--topology", "2P3D"]
    if "--arrivals" not in arguments:
        fixed += ["--duration-s", 1]
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


def test_changes_of_cluster_and_mix_are_shown_over_time(capsys):
    arguments = ["--duration-s", 30, "--rate", 10, "--policies", "round_robin,locality", "--profile", "other.profile"]
    mixes = ["--mix", "domain 0=1", "--drift", "10:domain 1=1,domain 2=1"]
    workers = ["--lose", "decode-1@15", "--join", "decode-1@20"]
    assert run(*arguments, *mixes, *workers) == 0
    shown = capsys.readouterr().out
    assert shown.count("the mix changes") == shown.count("decode-1 lost") == shown.count("decode-1 joined") == 2
    assert run(*arguments, *mixes, *workers, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [timeline["policy"] for timeline in document["timelines"]] == ["round_robin", "locality"]
    for row, timeline in zip(document["rows"], document["timelines"], strict=True):
        assert [felt["time_s"] for felt in timeline["recoveries"]] == [10, 15, 20]
        assert len(timeline["windows"]) == 5
        assert 0 < sum(window["failed"] for window in timeline["windows"]) == row["failed"]


def test_a_worker_beyond_the_topology_joins_it(capsys):
    assert run("--rate", 30, "--join", "decode-3@0.5", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["failed"] == 0 for row in rows)


def test_seeds_are_paired_and_policies_compared_with_the_best_balancer(capsys):
    arguments = [
        "--rate",
        200,
        "--policies",
        "round_robin,least_load,locality",
        "--profile",
        "other.profile",
        "--seeds",
        3,
    ]
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    assert "Change against the best load balancer" in shown
    assert "Means over 3 seeds" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100
    assert run(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["seed"] for row in document["rows"]] == [0, 1, 2] * 3
    active = [
        one for one in document["changes"] if (one["policy"], one["figure"]) == ("locality", "active_experts_mean")
    ]
    assert active[0]["change"]["low"] <= active[0]["change"]["mean"] <= active[0]["change"]["high"] < 0


def test_the_page_has_the_figures_of_every_rate(capsys):
    assert run("--rate", 10, "--duration-s", 15, "--lose", "decode-0@8", "--html", "out.html") == 0
    assert "wrote out.html" in capsys.readouterr().out
    page = Path("out.html").read_text()
    assert (
        page.count("Distribution of TPOT") == page.count("TPOT over time") == page.count("<title>Active experts") == 1
    )
    assert "dashed lines mark changes" in page
    assert "<script" not in page


def test_made_up_workloads_bring_profile_and_step_times(capsys):
    arguments = ["--rate", 20, "--policies", "least_load,locality", "--output-tokens", 40]
    assert run(*arguments, trace="task") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("2P3D, made-up task requests to Qwen3-30B-A3B, 6 of its MoE layers")
    assert "nothing here was measured" in shown
    assert run("--rate", 20, "--steps", "steps.csv", trace="language") == 1
    assert "--profile and --steps go with a trace" in capsys.readouterr().err


def test_groups_of_ranks_scarce_kv_and_first_tokens_from_prefill_can_be_asked_for(capsys):
    assert run("--rate", 60, "--kv-tokens", 96, "--prefill-first", "--topology", "2P3Dx2", "--warm-up-s", 0.2) == 0
    shown = capsys.readouterr().out
    assert "What arrived in the first 0.2 s is in no figure." in shown
    assert "a request was preempted for want of KV" in shown


def test_experts_are_placed_on_ranks_by_blocks_or_by_use(capsys):
    arguments = ["--rate", 200, "--policies", "locality", "--profile", "other.profile", "--expert-ranks", 4]
    shares = []
    for placement in ("contiguous", "balanced"):
        assert run(*arguments, "--placement", placement) == 0
        shown = " ".join(capsys.readouterr().out.split())
        shares.append(float(shown.partition("the rank with most has, on average: locality ")[2].partition("%")[0]))
    assert 25 <= shares[1] < shares[0]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--placement", "balanced"], 1, "--placement balanced needs --profile"),
        (["--placement", "balanced", "--profile", "other.profile", "--topology", "2P4D"], 1, "3 clusters for 4 groups"),
        (["--mix", "domain 0"], 2, "'domain 0' is not like en=0.8"),
        (["--mix", "domain 0=much"], 2, "'much' is not a number"),
        (["--mix", "zh=1"], 1, "no request is of 'zh'"),
        (["--drift", "5:domain 0=1"], 1, "say by --mix what it is before"),
        (["--drift", "domain 0=1"], 2, "is not like 60:en=0.2,zh=0.8"),
        (["--lose", "decode-1"], 2, "'decode-1' is not like decode-3@60"),
        (["--lose", "decode-1@soon"], 2, "'soon' is not a number"),
        (["--lose", "decode-1@-1"], 2, "'-1' is no time from 0 s on"),
        (["--lose", "decode-7@1"], 1, "no worker is named 'decode-7'"),
        (["--join", "decode-5@1"], 1, "decode-3 has to join too"),
        (["--join", "router-1@1"], 1, "no worker is named 'router-1'"),
        (["--warm-up-s", "-1"], 1, "warm_up_s must be finite and not negative"),
        (["--kv-tokens", "20"], 1, "the longest request has 53 tokens"),
        (["--html", "a.trace"], 1, "a.trace"),
        (["--model", "qwen"], 1, "--model goes with a workload that is made up (task, language)"),
        (["--policies", "fastest"], 2, "'fastest' is none of round_robin"),
        (["--policies", "marginal,random,marginal"], 2, "marginal is named 2 times; name each once"),
        (["--rate", 30], 2, "30.0 is named 2 times; name each once"),
        (["--policies", "locality"], 1, "locality needs --profile"),
        (["--policies", "locality", "--profile", "other.profile", "--topology", "2P4D"], 1, "3 centroids for 4 decode"),
        (["--topology", "2D"], 1, "'2D' is not like 8P16D"),
        (["--arrivals", "times.txt"], 1, "give either --rate or --arrivals"),
        (["--graph-sizes", "1,many"], 2, "'1,many' is not like 1,2,4,8"),
        (["--graph-sizes", "4,2"], 1, "graph_sizes must be ascending"),
        (["--rate", "-3"], 1, "rate_per_s must be above zero, got -3"),
        (["--steps", "a.trace"], 1, "a.trace: "),
        (["--workload", "no.trace"], 1, "no.trace"),
    ],
)
def test_what_cannot_be_simulated_is_one_message(arguments, status, message, capsys):
    assert run("--rate", 30, *arguments) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", -3], "rate_per_s must be above zero, got -3"),
        (["--policies", "random,locality", "--profile", "other.profile", "--topology", "2P4D"], "3 centroids for 4"),
    ],
)
def test_what_the_last_run_cannot_do_is_said_before_the_first(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("coterie.cli.simulate.run", lambda *_, **__: pytest.fail("a run was made"))
    assert run("--rate", 30, *arguments) == 1
    assert message in capsys.readouterr().err


def test_requests_come_at_the_times_of_a_log(files, capsys):
    (files / "times.txt").write_text("".join(f"{1764489600 + i / 25}\n" for i in range(50)))
    assert run("--arrivals", "times.txt", "--policies", "least_load", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["requests"] == 50
    assert row["rate"] == pytest.approx(50 / (49 / 25))


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("0\nsoon\n", [], "line 2: 'soon' is no time in seconds"),
        ("0\n2\n1\n", [], "line 3: 1 s comes before the line above it; sort the file"),
        ("", [], "no line with a time"),
        ("0\n", ["--duration-s", 5], "--duration-s goes with --rate"),
        ("0\n", ["--burstiness", 5], "--burstiness goes with --rate"),
    ],
)
def test_a_log_that_cannot_be_followed_is_named(files, text, flags, message, capsys):
    (files / "times.txt").write_text(text)
    assert run("--arrivals", "times.txt", *flags) == 1
    assert message in capsys.readouterr().err


def test_batches_are_padded_to_captured_graphs(capsys):
    def p50(*flags):
        assert run("--rate", 30, "--policies", "least_load", "--json", *flags) == 0
        return json.loads(capsys.readouterr().out)["rows"][0]["tpot_p50_ms"]

    assert p50("--graph-sizes", "256") > p50()


def test_the_refit_window_is_the_policys(monkeypatch, capsys):
    made = []

    def noted(*given, **named):
        made.append(named)
        return make_policy(*given, **named)

    monkeypatch.setattr("coterie.cli.simulate.make_policy", noted)
    assert run("--rate", 30, "--policies", "locality_refit", "--profile", "other.profile", "--refit-window-s", 2.5) == 0
    assert {named["refit_window_s"] for named in made if "refit_window_s" in named} == {2.5}


@pytest.mark.parametrize("policy", [name for name in DECODE_POLICIES if name.startswith("locality")])
def test_every_policy_that_needs_a_profile_asks_for_it_before_anything_runs(capsys, policy):
    assert run("--rate", 30, "--policies", policy) != 0
    assert f"{policy} needs --profile" in capsys.readouterr().err
