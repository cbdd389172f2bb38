"""Outcomes as tables for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coterie.report.page import Figure, Section, Text, render
from coterie.report.svg import MUTED, SERIES, draw
from coterie.report.tables import NONE, Table, number
from coterie.reproduce.figures import Line, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

NOTE = "Changes in per cent; off: simulated less published, from the nearer end of a range."
_MOST_BARS = 40


def table(outcome: Outcome) -> Table:
    """Simulated beside published."""
    columns = ("workload", "model", "setting", "metric", ">simulated", ">published", ">off", "source")
    return Table(outcome.title, columns, tuple(_cells(line) for line in outcome.lines), NOTE)


def _cells(line: Line) -> tuple[str, ...]:
    metric = f"{line.metric} against {line.against}" if line.against else line.metric
    source = f"{line.source} (fitted)" if line.fitted else line.source
    return (
        line.workload or NONE,
        line.model or NONE,
        line.setting or NONE,
        metric,
        number(line.simulated),
        _published(line),
        number(line.off),
        f"{source}; {line.note}" if line.note else source,
    )


def _published(line: Line) -> str:
    if line.published is not None or line.low is None:
        return number(line.published)
    return f"{number(line.low)} to {number(line.high)}"


def page(outcomes: Sequence[Outcome], subtitle: str) -> str:
    """One HTML file: for each figure a drawing, the findings and the table.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    return render("Figures of ELDR, simulated", subtitle, [_section(outcome) for outcome in outcomes])


def _section(outcome: Outcome) -> Section:
    found = tuple(Text(finding, strong=i == 0) for i, finding in enumerate(outcome.findings))
    caption = "Filled: simulated. Hollow: published, with its range. Grey: the simulation was fitted to it."
    drawings = tuple(Figure(_draw(outcome.title, metric, lines), caption) for metric, lines in _groups(outcome))
    return Section(outcome.title, (*found, *drawings, table(outcome)))


def _groups(outcome: Outcome) -> list[tuple[str, list[Line]]]:
    """Lines of one metric share an axis; a drawing has room for so many."""
    found = []
    for metric in dict.fromkeys(line.metric for line in outcome.lines):
        lines = [line for line in outcome.lines if line.metric == metric and line.simulated is not None]
        found += [(metric, lines[i : i + _MOST_BARS]) for i in range(0, len(lines), _MOST_BARS)]
    return found


def _draw(title: str, metric: str, lines: Sequence[Line]) -> str:
    """A row for each line: a dot for the simulated value, a ring or a bar for what was published."""

    def paint(figure: Drawing) -> None:
        axes = figure.subplots()
        for height, line in enumerate(lines):
            colour = MUTED if line.fitted else SERIES[0]
            if line.low is not None and line.high is not None:
                axes.plot([line.low, line.high], [height, height], color=SERIES[1], linewidth=4, alpha=0.5)
            if line.published is not None:
                axes.plot([line.published], [height], "o", markerfacecolor="none", markeredgecolor=SERIES[1])
            if line.simulated is not None:
                axes.plot([line.simulated], [height], "o", color=colour, markersize=4)
        axes.set_yticks(range(len(lines)), [_name(line) for line in lines])
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.set_xlabel(metric)

    return draw(f"{title}: {metric}", (8.4, 0.9 + 0.24 * len(lines)), paint)


def _name(line: Line) -> str:
    return ", ".join(part for part in (line.workload, line.model, line.setting) if part) or line.metric
