import shutil

import pytest

from coterie.errors import InputError
from coterie.published import (
    FOLDER,
    Check,
    Fitted,
    FittedSpread,
    FittedStep,
    dump_fitted,
    load_fitted,
    load_published,
)

PUBLISHED = load_published()


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER, tmp_path / "published")


def test_the_artifact_has_six_policies_at_five_rates_in_six_cells():
    assert len({(row.workload, row.model, row.rate, row.policy) for row in PUBLISHED.tpot}) == 6 * 5 * 6
    assert {row.policy for row in PUBLISHED.tpot} == {
        "round_robin", "random", "least_load", "power_of_two", "domain", "eldr",
    }  # fmt: skip


def test_only_round_robin_may_be_fitted_to():
    assert {row.policy for row in PUBLISHED.to_fit().tpot} == {"round_robin"}
    assert {row.policy for row in PUBLISHED.tpot if row.use == "compare"} & {"round_robin"} == set()


def test_no_change_by_a_policy_may_be_fitted_to():
    assert {row.figure for row in PUBLISHED.to_fit().figures} == {"layer_time", "motivation"}


def test_every_figure_has_a_value_or_a_range_and_a_source():
    for row in PUBLISHED.figures:
        assert (row.value is None) == (row.low is not None) == (row.high is not None), row
        assert row.source


def test_a_range_stands_for_its_middle():
    row = PUBLISHED.figure("motivation", "same_domain_active", workload="task")
    assert (row.low, row.high, row.middle) == (-21, -17, -19)


def test_a_figure_is_asked_for_unambiguously():
    with pytest.raises(InputError, match="0 rows with"):
        PUBLISHED.figure("motivation", "colour")
    with pytest.raises(InputError, match="2 rows with"):
        PUBLISHED.figure("motivation", "same_domain_active")


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("artifact.csv", "fit,task,qwen,20", "tune,task,qwen,20", "artifact.csv, line 2: .*'tune'"),
        ("artifact.csv", "15.246", "fast", "artifact.csv, line 2: .*tpot_p50_ms"),
        ("figures.csv", "figure,use,", "figure,usage,", "figures.csv, line 2: .*usage"),
        ("models.toml", "layers = 48", "", "models.toml: .*layers"),
        ("workloads.toml", "[task]", "[task", "workloads.toml: "),
    ],
)
def test_a_damaged_file_is_named_with_the_line(folder, name, old, new, problem):
    file = folder / name
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=problem):
        load_published(folder)


def test_a_missing_or_oversized_file_is_refused(folder):
    (folder / "models.toml").write_text("# " + "x" * (1 << 20))
    with pytest.raises(InputError, match=r"models.toml: larger than 1048576 bytes"):
        load_published(folder)
    (folder / "models.toml").unlink()
    with pytest.raises(InputError, match=r"models.toml: cannot be read"):
        load_published(folder)


def test_fitted_constants_come_back_from_their_file(tmp_path):
    fitted = Fitted(
        2.0,
        {"task": FittedSpread(1.0, 1.5, 0.5, 0.25, 0.125)},
        {"qwen": FittedStep(3e-5, 3e-6, [(10.0, 0.008), (20.5, 0.0)])},
        [Check("rho of count: mean", 0.745, -1.0)],
    )
    file = tmp_path / "fitted.toml"
    file.write_text(dump_fitted(fitted))
    assert load_fitted(file) == fitted


def test_the_package_has_constants_for_all_of_its_workloads_and_models():
    fitted = load_fitted()
    assert fitted.spread.keys() == PUBLISHED.workloads.keys()
    assert fitted.step.keys() == PUBLISHED.models.keys()
