"""`coterie workers`."""

from __future__ import annotations

import time

import click
import msgspec

from coterie.cli.admin_client import Admin, asks_admin, tell
from coterie.cli.show import show
from coterie.errors import EngineError
from coterie.gateway.admin.api import State, WorkerRow, Workers
from coterie.report.tables import NONE, Table, printable

_LOOK_S = 0.2
_WIDTH = 120

_wait_option = click.option(
    "--wait-s", type=click.FloatRange(min=0), default=0.0, show_default=True, help="How long to wait until it is so."
)
_name_argument = click.argument("name")


@click.group()
def workers() -> None:
    """See, add, drain and remove the workers of a running gateway.

    What is changed so is lost when the gateway reads its configuration again: change that file, too.
    """


@workers.command("list")
@asks_admin
def list_(admin: Admin, as_json: bool) -> None:
    """Show all workers and what they have to do."""
    found = admin.ask("GET", "workers", reply=Workers)
    if as_json:
        tell(found, as_json=True, say=str)
    else:
        show((), (_table(found.workers),), _WIDTH)


@workers.command()
@click.argument("role", type=click.Choice(("prefill", "decode")))
@click.argument("worker_url", metavar="WORKER_URL")
@_wait_option
@asks_admin
def add(admin: Admin, as_json: bool, role: str, worker_url: str, wait_s: float) -> None:
    """Add the server at WORKER_URL as a worker; it is sent requests once it is well."""
    row = admin.ask("POST", "workers", reply=WorkerRow, body={"role": role, "url": worker_url})
    tell(_wait(admin, row, "available", wait_s), as_json=as_json, say=_said)


@workers.command()
@_name_argument
@_wait_option
@asks_admin
def drain(admin: Admin, as_json: bool, name: str, wait_s: float) -> None:
    """Send the worker NAME nothing more; it is drained when its last request is over."""
    row = admin.ask("POST", "workers", name, "drain", reply=WorkerRow)
    tell(_wait(admin, row, "drained", wait_s), as_json=as_json, say=_said)


@workers.command()
@_name_argument
@asks_admin
def undrain(admin: Admin, as_json: bool, name: str) -> None:
    """Use the drained worker NAME again."""
    tell(admin.ask("POST", "workers", name, "undrain", reply=WorkerRow), as_json=as_json, say=_said)


@workers.command()
@_name_argument
@_wait_option
@asks_admin
def remove(admin: Admin, as_json: bool, name: str, wait_s: float) -> None:
    """Remove the worker NAME; it is forgotten when its last request is over."""
    row = admin.ask("DELETE", "workers", name, reply=WorkerRow)
    tell(_wait(admin, row, "gone", wait_s), as_json=as_json, say=_said)


def _wait(admin: Admin, row: WorkerRow, state: State, wait_s: float) -> WorkerRow:
    """The worker's row once it is in this state; at once, whatever it is, where nobody waits."""
    end_s = time.monotonic() + wait_s
    while wait_s and row.state != state:
        found = {one.name: one for one in admin.ask("GET", "workers", reply=Workers).workers}
        if row.name not in found:
            return msgspec.structs.replace(row, state="gone", requests=0, tokens=0, connections=0)
        row = found[row.name]
        if row.state != state and time.monotonic() > end_s:
            raise EngineError(f"{_said(row)}; it was to be {state} within {wait_s:g} s")
        time.sleep(_LOOK_S)
    return row


def _said(row: WorkerRow) -> str:
    problem = f" ({row.problem})" if row.problem and row.state == "unavailable" else ""
    held = f", {row.requests} requests" if row.requests else ""
    return printable(f"{row.name} {row.url} is {row.state}{problem}{held}")


def _table(rows: list[WorkerRow]) -> Table:
    columns = ("worker", "url", "state", ">requests", ">tokens", "problem")
    cells = tuple(
        (row.name, row.url, row.state, str(row.requests), str(row.tokens), row.problem or NONE) for row in rows
    )
    return Table("workers", columns, cells)
