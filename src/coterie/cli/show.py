"""What commands say on a terminal: sentences and tables, and what they do at present."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table as RichTable

from coterie.report.tables import Table, printable


def show(sentences: Sequence[str], tables: Sequence[Table], width: int) -> None:
    """Print to stdout: sentences, the first one bold, then tables.

    Args:
        sentences: what to say first.
        tables: what follows.
        width: of what is printed; less on a narrower terminal.
    """
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, width) if console.is_terminal else width
    for i, text in enumerate(sentences):
        console.print(text, style="bold" if i == 0 else None)
    for table in tables:
        console.print()
        console.print(table.title, style="bold")
        console.print(drawn(table))
        if table.note:
            console.print(printable(table.note), style="dim")


@contextmanager
def working(first: str) -> Iterator[Callable[[str], None]]:
    """Show what is done at present, on stderr if that is a terminal.

    Args:
        first: what is done first.

    Yields:
        What is to be told of each thing that is done next.
    """
    with Console(stderr=True).status(first) as status:
        yield status.update


def drawn(table: Table) -> RichTable:
    """A table as a terminal shows it, without its title."""
    grid = RichTable(box=None, pad_edge=False, show_header=any(name for name, _ in table.headings))
    for name, right in table.headings:
        grid.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*map(printable, row))
    return grid
