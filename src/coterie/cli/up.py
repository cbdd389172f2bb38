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
    show = _JsonLines(cluster) if as_json else live_table(cluster)
    with show, suppress(KeyboardInterrupt), cluster:
        cluster.wait()


def default_engine_env() -> Path:
    """The engine's environment where the cluster's file names none."""
    return Path(os.environ.get("COTERIE_VLLM_ENV") or ".venv-vllm")


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Signal handler: what asks for an end ends things as Ctrl-C does."""
    raise KeyboardInterrupt


def live_table(cluster: Cluster, console: Console | None = None) -> AbstractContextManager[object]:
    """A table of all processes that renews itself."""
    return Live(get_renderable=lambda: _table(cluster), console=console, refresh_per_second=1 / _LOOK_S)


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


class _JsonLines:
    """Prints all states whenever one changes, and once more at the end; a context manager."""

    def __init__(self, cluster: Cluster, write: Callable[[str], None] = click.echo) -> None:
        self._cluster = cluster
        self._write = write
        self._last: list[MemberStatus] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="coterie-up-json", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_S):
            self._print_change()

    def _print_change(self) -> None:
        statuses = _statuses(self._cluster)
        if statuses != self._last:
            self._write(json.dumps([asdict(status) for status in statuses]))
            self._last = statuses

    def __enter__(self) -> _JsonLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._print_change()
