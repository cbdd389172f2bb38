"""Figures of cells that know their answers, and one small simulation."""

from dataclasses import replace

import pytest

from coterie.reproduce.cells import BALANCERS, RATES, Cell, Plan, Setup
from coterie.reproduce.figures import FIGURES, Bench, Line, artifact_change, beside
from coterie.reproduce.shown import table
from coterie.routing import LOAD_POLICIES
from coterie.sim import Row

QUICK = Plan(measured_s=1.0, warm_up_s=0.5, requests=40, calibration=20)


class Known(Cell):
    """Runs take the time that the policy's name says, and 1 % less for each policy that the rate prefers."""

    def _simulate(self, setup):
        slow = {"round_robin": 20.0, "random": 22.0, "least_load": 20.0, "power_of_two": 21.0, "domain": 19.0}
        ms = slow.get(setup.policy, 18.0) - (1.0 if setup.policy == "random" and setup.rate == 100 else 0)
        figures = dict.fromkeys(Row.__dataclass_fields__)
        return Row(**{**figures, "tpot_p50_ms": ms, "tpot_p99_ms": 2 * ms, "active_experts_mean": 3 * ms})


@pytest.fixture
def bench():
    bench = Bench(QUICK)
    for workload in bench.published.workloads:
        for model in bench.published.models:  # also those that only one figure is of
            bench._cells[workload, model] = Known(workload, model, QUICK, lambda _: None)
    return bench


def test_a_change_is_against_the_best_load_balancer_at_the_rate():
    cell = Known("task", "qwen", QUICK, lambda _: None)
    # 18 ms against the 20 ms of round robin and least load: -10 %
    assert cell.change(Setup("locality", 20), BALANCERS, "tpot_p50") == pytest.approx(-10)
    assert cell.change(Setup("locality", 20), "domain", "tpot_p50") == pytest.approx(100 * (18 / 19 - 1))
    assert cell.mean_change(Setup("locality", 0), BALANCERS, "tpot_p99") == pytest.approx(-10)


def test_the_artifacts_changes_are_those_that_its_authors_figures_give():
    bench = Bench(QUICK)
    cell = bench.cell("task", "qwen")
    # 13.047 / 14.787, 16.391 / 18.819, 22.615 / 26.669, 23.559 / 25.527, 21.746 / 25.124
    by_hand = [13.047 / 14.787, 16.391 / 18.819, 22.615 / 26.669, 23.559 / 25.527, 21.746 / 25.124]
    assert artifact_change(bench.published, cell, "eldr", "tpot_p50") == pytest.approx(100 * (sum(by_hand) / 5 - 1))


def test_the_main_figure_has_three_policies_and_two_percentiles_of_six_cells(bench):
    outcome = FIGURES["main"](bench)
    assert len(outcome.lines) == 6 * 2 * 3
    assert not any(line.fitted for line in outcome.lines)
    locality = [line for line in outcome.lines if (line.setting, line.metric) == ("locality", "tpot_p50")]
    # -10 % in all cells against -13.9, -7.0, -9.4, -10.0, -7.3, -5.9: 3.9 + 3 + 0.6 + 0 + 2.7 + 4.1 = 14.3
    assert [line.published for line in locality] == [-13.9, -7.0, -9.4, -10.0, -7.3, -5.9]
    assert outcome.findings[0] == "Locality's six P50 changes are off by 2.4 points on average (2.2 by a constant)."
    assert "in 6 of 6 cells" in outcome.findings[1]  # 18 ms is below the 19 ms of Domain
    assert "in 4 of 6 cells" in outcome.findings[2]  # two of the published tails are longer


def test_every_published_row_of_a_figure_has_a_line(bench):
    for name in ("active", "tau", "balance", "signatures", "topology", "prefix_cache"):
        lines = FIGURES[name](bench).lines
        assert len(lines) == len(bench.rows(name)) > 0
        assert all(line.simulated is not None or line.note for line in lines)


def test_experts_on_several_gpus_are_shown_for_both_workloads_with_and_without_placement(bench):
    lines = FIGURES["ep"](bench).lines
    assert len(lines) == 2 * 2 * 2  # percentiles, workloads, placements
    assert all(line.simulated == pytest.approx(-10) and line.off == 0 for line in lines if line.low <= -10)


def test_experts_are_placed_where_they_are_spread():
    setup = Setup("locality", RATES[0], topology="1P2D", expert_ranks=4)
    cell = Cell("task", "qwen", QUICK, lambda _: None)
    blocks, placed = cell.run(setup), cell.run(replace(setup, placed=True))
    assert placed.busiest_rank_experts_mean < blocks.busiest_rank_experts_mean


def test_what_constants_were_fitted_to_is_marked(bench):
    assert all(line.fitted for line in FIGURES["inputs"](bench).lines)
    marks = {(line.metric, line.fitted) for line in FIGURES["round_robin"](bench).lines}
    assert marks == {("tpot_p50_ms", True), ("tpot_p99_ms", False)}


def test_a_value_is_off_by_its_distance_from_the_published_one_or_the_range():
    line = Line("", "", "", "", "r", -5.0, None, -9.0, -7.0, "")
    assert line.off == 2.0
    assert replace(line, simulated=-8.0).off == 0.0
    assert replace(line, simulated=-10.0).off == -1.0
    assert replace(line, published=-6.0).off == 1.0
    assert replace(line, simulated=None).off is None


def test_a_table_says_what_was_fitted_and_what_is_missing():
    row = Bench(QUICK).published.figure("motivation", "prefill_decode_r")
    cells = table(FIGURES["inputs"](Bench(QUICK))).rows[0]
    assert cells[-1] == "fitted.toml (fitted)"
    assert beside(row, 0.8).fitted
    assert beside(row, None, "no counts").note == "no counts"


def test_a_small_simulation_is_the_same_each_time():
    found = [
        Cell("task", "qwen", QUICK, lambda _: None).run(Setup("locality", RATES[0], topology="1P2D")) for _ in range(2)
    ]
    assert found[0] == found[1]
    assert found[0].requests > 0


def test_a_run_is_made_once():
    told = []
    cell = Cell("task", "qwen", QUICK, told.append)
    for _ in range(2):
        cell.change(Setup("locality", RATES[0], topology="1P2D"), BALANCERS, "tpot_p50")
    assert sum("requests/s" in text for text in told) == 1 + len(LOAD_POLICIES)
