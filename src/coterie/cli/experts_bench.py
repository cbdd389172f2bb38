"""`coterie experts bench`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from coterie.cli.show import show, working
from coterie.experts.bench import BenchConfig, BenchRow, measure
from coterie.report.tables import Table, number

_WIDTH = 100


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--monitor", metavar="URL", default="http://127.0.0.1:8100", show_default=True, help="The monitor.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 16, 64),
    show_default=True,
    help="Tokens of a call; may be given several times.",
)
@click.option("--clients", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that ask at once.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="How long to ask with each number of tokens.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def bench(model: Path, monitor: str, tokens: tuple[int, ...], clients: int, seconds: float, as_json: bool) -> None:
    """Measure how fast the servers of a monitor reply for the model in the folder MODEL.

    Clients ask with random tokens for one layer after the other, as fast as they can: it is load for the servers.
    """
    config = BenchConfig(model, monitor, tokens, clients, seconds)
    with working(f"{clients} clients ask"):
        rows = measure(config)
    if as_json:
        click.echo(msgspec.json.encode(rows))
    else:
        show((f"{clients} clients, {seconds:g} s each",), (calls(rows),), _WIDTH)


def calls(rows: list[BenchRow]) -> Table:
    """A row for each number of tokens."""
    columns = (">tokens", ">calls/s", ">tokens/s", ">p50 ms", ">p99 ms", ">requests per batch")
    return Table("calls, each for the experts of one layer", columns, tuple(map(_row, rows)))


def _row(row: BenchRow) -> tuple[str, ...]:
    rates = number(row.calls_per_s, 0), number(row.calls_per_s * row.tokens, 0)
    return (str(row.tokens), *rates, number(row.p50_ms, 3), number(row.p99_ms, 3), number(row.requests_per_batch))
