"""Tables of text, shown alike in a terminal and on a page; and how figures are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        title: what it shows.
        columns: headings; one that begins with `>` is of a column of figures, which is set flush right.
        rows: cells, as many in each row as there are columns.
        note: how to read it; empty if that is plain.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title

    @property
    def headings(self) -> tuple[tuple[str, bool], ...]:
        """Each heading, and whether its column is of figures."""
        return tuple((column.removeprefix(">"), column.startswith(">")) for column in self.columns)


def number(value: float | None, digits: int = 2) -> str:
    """A figure; `-` for one that is not known or not defined."""
    return NONE if value is None or value != value else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share as per cent; `-` for one that is not known or not defined."""
    return NONE if value is None or value != value else f"{value:.{digits}%}"


def positions(values: Sequence[int]) -> str:
    """Ascending whole numbers with their runs drawn together: 0-3, 7, 9-10."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or NONE


def printable(text: str) -> str:
    """The text with a replacement character for each control character: labels and names come from files."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
