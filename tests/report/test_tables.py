from math import nan

import pytest

from coterie.report.tables import Table, number, percent, positions, printable


def test_figures_that_are_not_known_or_not_defined_are_dashes():
    assert [number(value) for value in (1.005, None, nan)] == ["1.00", "-", "-"]
    assert [percent(value) for value in (0.1234, None, nan)] == ["12.3%", "-", "-"]


def test_runs_of_positions_are_drawn_together():
    assert positions((0, 1, 2, 4, 6, 7)) == "0-2, 4, 6-7"
    assert positions(()) == "-"


def test_headings_say_which_columns_are_of_figures():
    table = Table("", ("name", ">count"), (("a", "1"),))
    assert table.headings == (("name", False), ("count", True))


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(AssertionError):
        Table("title", ("a", "b"), (("1",),))


def test_control_characters_reach_no_terminal():
    assert printable("a\x1b[31m\nä") == "a\ufffd[31m\ufffdä"
