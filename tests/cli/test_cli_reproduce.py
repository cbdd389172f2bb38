import json

import pytest

from coterie.cli import main
from coterie.reproduce.figures import FIGURES

QUICK = ("--measured-s", "1", "--warm-up-s", "0.5")


def test_the_list_names_every_figure(capsys):
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "--list"])
    assert end.value.code == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FIGURES)


def test_json_has_simulated_and_published_values(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "inputs", "--json"])
    (figure,) = json.loads(capsys.readouterr().out)["figures"]
    assert figure["name"] == "inputs"
    assert all(line["fitted"] and line["simulated"] and line["published"] for line in figure["lines"])


def test_a_page_shows_simulated_beside_published(tmp_path, capsys):
    page = tmp_path / "out.html"
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "inputs", *QUICK, "--html", str(page)])
    assert end.value.code == 0
    assert f"wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<svg") == 2  # shares in per cent and correlations have an axis each
    assert "fitted" in text


def test_an_unknown_figure_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as end:
        main(["reproduce", "figure9"])
    assert end.value.code == 2
    assert "prefix_cache" in capsys.readouterr().err
