"""`coterie up`."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie.up.cluster import Cluster, MemberStatus
from coterie.up.config import load_cluster_config

_COLOURS = {"ready": "green", "failed": "red", "stopped": "dim"}
_LOOK_S = 0.25


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print all states as one line of JSON whenever one changes, for logs and pipes.",
)
def up(file: Path, as_json: bool) -> None:
    """Run a local cluster: engines and gateway from one YAML FILE, until Ctrl-C.

    A process that ends is started again, up to five times in a row; one that ends more often, or before it was
    ever ready, ends the cluster.  Ctrl-C or SIGTERM stops everything, the last started first; a second Ctrl-C
    kills what is left at once.  Logs are in the file's `run_dir`.
    """
    cluster = Cluster(load_cluster_config(file, engine_env=default_engine_env()))
    signal.signal(signal.SIGTERM, interrupt)
    with _show(cluster, as_json), suppress(KeyboardInterrupt), cluster:
        cluster.wait()


def _show(cluster: Cluster, as_json: bool) -> AbstractContextManager[object]:
    return _Changes(cluster, _as_json, err=False) if as_json else show_states(cluster, Console())


def default_engine_env() -> Path:
    """The engine's environment where the cluster's file names none."""
    return Path(os.environ.get("COTERIE_VLLM_ENV") or ".venv-vllm")


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Signal handler: what asks for an end ends things as Ctrl-C does."""
    raise KeyboardInterrupt


def show_states(cluster: Cluster, console: Console) -> AbstractContextManager[object]:
    """A table of all processes that renews itself; where there is no terminal, a line for each change."""
    if console.is_terminal:
        return Live(get_renderable=lambda: _table(cluster), console=console, refresh_per_second=1 / _LOOK_S)
    return _Changes(cluster, _as_lines, err=console.stderr)


def _table(cluster: Cluster) -> Table:
    table = Table("name", "role", "url", "pid", "state", "restarts", title=f"logs in {cluster.config.run_dir}")
    for status in _statuses(cluster):
        colour = _COLOURS.get(status.state, "yellow")
        pid = "" if status.pid is None else str(status.pid)
        state = f"[{colour}]{status.state}[/]"
        table.add_row(status.name, status.role, status.url, pid, state, str(status.restarts))
    return table


def _statuses(cluster: Cluster) -> list[MemberStatus]:
    return [member.status() for member in cluster.members()]


def _as_json(now: list[MemberStatus], _before: list[MemberStatus]) -> str:
    return json.dumps([asdict(status) for status in now])


def _as_lines(now: list[MemberStatus], before: list[MemberStatus]) -> str:
    """A line for each process whose state changed."""
    return "\n".join(f"{status.name}: {status.state} {status.url}".rstrip() for status in now if status not in before)


class _Changes:
    """Prints states whenever one changes, for logs and pipes, and once more at the end; a context manager.

    Args:
        cluster: whose processes are shown.
        text: what to print, given the states now and those printed before.
        err: whether to print it on stderr.
    """

    def __init__(
        self, cluster: Cluster, text: Callable[[list[MemberStatus], list[MemberStatus]], str], *, err: bool
    ) -> None:
        self._cluster = cluster
        self._text = text
        self._err = err
        self._last: list[MemberStatus] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="coterie-up-changes", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_S):
            self._print_change()

    def _print_change(self) -> None:
        statuses = _statuses(self._cluster)
        if statuses != self._last:
            click.echo(self._text(statuses, self._last), err=self._err)
            self._last = statuses

    def __enter__(self) -> _Changes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._print_change()
