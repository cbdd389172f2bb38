"""The fit sees nothing but the rows that it may see."""

import csv
import math
import shutil
import sys

import fit_published
import pytest

from coterie.published import FOLDER, load_published
from coterie.reproduce import motivation


@pytest.fixture(autouse=True)
def rough(monkeypatch):
    """Few layers and draws: figures are rough, and as dependent on the rows as ever."""
    monkeypatch.setattr(fit_published, "_LAYERS", 1)
    monkeypatch.setattr(fit_published, "_DRAWS", 2)
    monkeypatch.setattr(motivation, "_DRAWS", 2)
    monkeypatch.setattr(motivation, "_PAIRS", 200)


def run(monkeypatch, folder, out):
    arguments = ["--published", folder, "--out", out, "--requests", "200", "--rounds", "0"]
    monkeypatch.setattr(sys, "argv", ["fit_published.py", *map(str, arguments)])
    fit_published.main()
    return out.read_text()


def test_constants_are_the_same_without_the_rows_that_are_for_comparison(monkeypatch, tmp_path):
    bare = shutil.copytree(FOLDER, tmp_path / "bare")
    for name in ("artifact.csv", "figures.csv"):
        with open(bare / name, newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if row["use"] == "fit"]
        with open(bare / name, "w", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames)
            writer.writeheader()
            writer.writerows(rows)
    assert load_published(bare).tpot == load_published().to_fit().tpot
    whole = run(monkeypatch, FOLDER, tmp_path / "whole.toml")
    assert run(monkeypatch, bare, tmp_path / "bare.toml") == whole


def test_constants_follow_the_rows_that_may_be_fitted_to(monkeypatch, tmp_path):
    slower = shutil.copytree(FOLDER, tmp_path / "slower")
    file = slower / "figures.csv"
    file.write_text(file.read_text().replace("ms_at_100_active,0.35", "ms_at_100_active,0.70"))
    published = load_published(slower)
    assert fit_published.expert_s(published) == pytest.approx(2 * fit_published.expert_s(load_published()))


def test_the_fit_finds_constants_that_the_statistics_decide(monkeypatch):
    """Statistics made up so that each is on target where one constant is twice its guess."""
    published = load_published().to_fit()
    wanted = fit_published.targets(published)
    names = dict(zip(wanted, fit_published.PRIOR, strict=False))

    def statistics(_published, constants, _requests):
        off = {name: math.log2(constants[names[name]] / (2 * fit_published.PRIOR[names[name]])) for name in names}
        return {name: middle + 10 * width * off.get(name, 0) for name, (middle, width) in wanted.items()}

    monkeypatch.setattr(fit_published, "statistics", statistics)
    found = fit_published.fit_generator(published, 100, 20)
    ratios = {name: found[name] / guess for name, guess in fit_published.PRIOR.items()}
    assert all(1.9 < ratio < 2.1 for ratio in ratios.values())


def test_constants_that_nothing_decides_stay_as_they_were_guessed(monkeypatch):
    published = load_published().to_fit()
    wanted = {name: middle for name, (middle, _) in fit_published.targets(published).items()}
    monkeypatch.setattr(fit_published, "statistics", lambda *_: wanted)
    assert fit_published.fit_generator(published, 100, 20) == pytest.approx(fit_published.PRIOR)


def test_both_ends_of_a_range_are_targets():
    wanted = fit_published.targets(load_published())
    changes = {name: value for name, (value, _) in wanted.items() if "same-domain" in name}
    assert list(changes.values()) == [-21, -17, -10, -3]


def test_a_table_is_level_around_each_batch_and_jumps_half_way():
    assert fit_published.level([10, 20, 40], [3.0, 5.0, 4.0]) == [
        (10, 3.0), (14.5, 3.0), (15.5, 5.0), (29.5, 5.0), (30.5, 4.0), (40, 4.0)
    ]  # fmt: skip
