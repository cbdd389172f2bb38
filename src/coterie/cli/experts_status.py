"""`coterie experts status`."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from coterie.cli.show import show
from coterie.experts.members import SHORT
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import Coverage, ServerRow, Status
from coterie.report.tables import NONE, Table, number

_WIDTH = 140
_MIB = 1 << 20


@click.command()
@click.option(
    "--monitor", "url", metavar="URL", default="http://127.0.0.1:8100", show_default=True, help="The monitor."
)
@click.option("--json", "as_json", is_flag=True, help="Print the monitor's reply as JSON, for programs.")
def status(url: str, as_json: bool) -> None:
    """Show the expert servers, their load and how many replicas the experts have."""
    found = ask(url, "GET", "/status", Status)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        show(tuple(_sentences(found)), (servers(found.servers),), _WIDTH)


def servers(rows: list[ServerRow]) -> Table:
    """A row for each server."""
    columns = ("server", "state", ">for s", ">silent s", ">replicas", ">pairs/s", ">requests", ">queue", ">MiB", "why")
    return Table("servers", columns, tuple(map(_row, rows)))


def _row(row: ServerRow) -> tuple[str, ...]:
    times = (number(row.state_s, 1), number(row.silent_s, 1))
    load = (str(row.held), number(row.pairs_per_s, 0), str(row.requests), str(row.queue))
    return (row.name, row.state, *times, *load, number(row.memory_bytes / _MIB, 0), row.reason or NONE)


def _sentences(found: Status) -> Iterator[str]:
    settled = "" if found.settled else "; it has just started, and others may yet register"
    yield f"epoch {found.epoch}, {found.followers} clients follow, monitor up for {found.up_s:.0f} s{settled}"
    yield from _coverage(found.coverage)


def _coverage(coverage: Coverage) -> Iterator[str]:
    if not coverage.model:
        return
    known_by = f"fingerprint {coverage.fingerprint[:SHORT]}"
    yield f"{coverage.model}: {coverage.layers} layers of {coverage.experts} experts, {known_by}"
    replicas = ", ".join(f"{count} on {servers}" for servers, count in coverage.replicas.items())
    yield f"experts, by number of servers that serve them: {replicas}"
    if coverage.first_missing is not None:
        layer, expert = coverage.first_missing
        yield f"experts that no server has: {coverage.missing}, layer {layer} expert {expert} first"
    if coverage.imbalance is not None:
        yield f"load of the busiest server over that of the mean server: {number(coverage.imbalance)}"
