from dataclasses import replace

import numpy as np
import pytest

from coterie.analysis import inspect_profile, inspect_trace
from coterie.calibration import fit
from coterie.report import figures, profile, trace
from coterie.report.tables import Table
from made_traces import domains_differ, roughly, without_labels, without_output

EVIL = "<script>alert(1)</script> $x$ \x1b[31m"


@pytest.fixture(scope="module")
def found():
    recorded = domains_differ(80)
    labels = tuple(EVIL if label == "domain 1" else label for label in recorded.labels)
    with roughly():
        return inspect_trace(replace(recorded, labels=labels, model="a <model>"), clusters=3)


def titles(tables: list[Table]):
    return [table.title.split(":")[0] for table in tables]


def test_tables_hold_the_numbers_found(found):
    tables = {table.title: table for table in trace.tables(found)}
    active = tables["Active experts per layer and decode step, of 32"]
    first, cluster = found.active[0], found.active[2]
    assert active.rows[0][:3] == ("8", "all requests", f"{first.active.value:.1f}")
    assert active.rows[2][4] == f"{cluster.reduction.value:.1%}"
    assert "Outputs replayed step by step" in active.note
    assert dict(tables["Trace"].rows)["requests"] == "80 of 80 used"


def test_what_was_not_measured_is_told_with_its_reason():
    found = inspect_trace(without_output(without_labels(domains_differ(40))), clusters=30)
    assert titles(trace.tables(found)) == ["Trace", "Expert skew", "Not measured"]
    reasons = dict(trace.missing_table(found).rows)
    assert "30 clusters" in reasons["clusters"]
    assert "no output tokens" in reasons["active"]
    assert "Answer: cannot tell" in trace.page(found)


def test_left_out_requests_are_told(found):
    subject = replace(found.subject, partly_counted=3, without_output=2, repeated=7)
    assert dict(trace.subject_table(subject, 0).rows)["left out"] == (
        "3 with a prompt that was only partly counted; 2 without counted output; 7 with the prompt of an earlier one"
    )


def test_a_label_that_begins_with_an_underscore_is_in_the_legend(found):
    plot = replace(found.plot, labels=tuple(f"_{label}" for label in found.plot.labels))
    drawn = figures.plot_figure(plot)
    assert all(f"_domain {n}<" in drawn for n in (0, 2, 3))


def test_of_many_labels_the_most_frequent_are_named(found):
    labels = {**{f"rare {i}": 1 for i in range(30)}, "": 5, "often": 7}
    told = dict(trace.subject_table(replace(found.subject, labels=labels), 0).rows)["labels"]
    assert told.startswith("often 7, (none) 5, rare 0 1, ")
    assert told.endswith(", rare 21 1, 8 more")


def test_figures_have_room_for_so_many_labels_and_no_more(found):
    points, experts = len(found.plot.labels), found.use.share.shape[1]
    plot = replace(found.plot, labels=("often", "often", *(f"label {i}" for i in range(points - 2))))
    drawn = figures.plot_figure(plot)
    assert "often<" in drawn
    assert f"{points - 1 - 32} other labels<" in drawn
    share = np.full((50, experts), 1 / experts)
    share[49] = np.eye(experts)[0]
    heat = figures.use_figure(replace(found.use, names=tuple(f"group {g}" for g in range(50)), share=share))
    assert ("group 0<" in heat, "group 31<" in heat, "group 49<" in heat) == (True, False, True)
    assert "32 of 50 groups" in heat


def test_long_tables_are_cut_to_the_worst_layers_and_say_so(found):
    assert trace.skew_table(found.skew, 2).title == "Expert skew: the 2 most skewed of 3 layers"
    kept = {row[0] for row in trace.skew_table(found.skew, 2).rows}
    assert str(min(found.skew, key=lambda one: one.gini).layer) not in kept


def test_the_page_is_whole_and_escapes_what_comes_from_files(found):
    page = trace.page(found)
    assert "<script" not in page
    assert all(c == "\n" or c.isprintable() for c in page)
    assert "a &lt;model&gt;" in page
    assert page.count("<svg") == 8
    assert "prove" in page


def test_a_profile_has_a_page_of_its_own():
    alone = inspect_profile(fit(domains_differ(80), 3, layers="all", starts=1, pairs=200))
    about, clusters = profile.tables(alone)
    assert dict(about.rows)["signatures"] == "count_idf over 3 layers: 0-2"
    assert [row[1] for row in clusters.rows] == [str(cluster.size) for cluster in alone.clusters]
    page = profile.page(alone)
    assert "cannot tell" in page
    assert page.count("<svg") == 1
