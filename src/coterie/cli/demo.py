"""`coterie demo`."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from coterie.cli.up import default_engine_env, interrupt, live_table
from coterie.up.cluster import Cluster
from coterie.up.config import load_cluster_config
from coterie.up.demo import DemoOptions, DemoReport, PolicyReport, run_demo

_PATH = click.Path(path_type=Path)
_NOTE = (
    "A decode step of this tiny model on a CPU takes about as long however many experts are active, so these "
    "tables show where requests went, not a speed-up.  CPU time includes NIXL's thread that polls without pause."
)


@click.command()
@click.option("--cluster", "file", required=True, type=_PATH, help="Cluster file; its `gateway` part is not used.")
@click.option("--calibrate", required=True, type=_PATH, help="Prompt file to collect and fit from.")
@click.option("--serve", required=True, type=_PATH, help="Prompt file to serve, one request a prompt.")
@click.option("--requests", default=60, show_default=True, type=click.IntRange(2), help="Requests under each policy.")
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(1), help="Requests in flight.")
@click.option("--max-tokens", default=48, show_default=True, type=click.IntRange(2), help="Output tokens of each.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the order and of the fit.")
@click.option("--json", "json_file", type=_PATH, help="Write the result to this file as well.")
def demo(file: Path, json_file: Path | None, **options: Any) -> None:
    """Compare least_load and locality on a local cluster of real engines.

    Starts the engines, collects a trace and fits a profile, then serves the same requests under both policies.
    """
    console = Console(stderr=True)
    config = replace(load_cluster_config(file, engine_env=default_engine_env()), gateway=None)
    signal.signal(signal.SIGTERM, interrupt)
    cluster = Cluster(config)
    with ExitStack() as stack:
        with live_table(cluster, console):
            stack.enter_context(cluster)
        with _DemoProgress(console) as progress:
            report = run_demo(cluster, DemoOptions(**options), progress)
    if json_file:
        json_file.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    _print(report)


class _DemoProgress:
    """One progress bar a step, on stderr; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("", visible=False)

    def step(self, title: str) -> None:
        """End the bar of the last step and show a new one."""
        self._bar.stop_task(self._task)
        self._task = self._bar.add_task(title, total=None)

    def begin(self, total: int, done: int) -> None:
        """Say how much the step has to do."""
        self._bar.update(self._task, total=total, completed=done)

    def advance(self) -> None:
        """Count one finished request."""
        self._bar.advance(self._task)

    def notice(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> _DemoProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


# --- tables ------------------------------------------------------------------------------------------


def _print(report: DemoReport) -> None:
    console = Console(highlight=False)
    console.print(_policies(report.policies), _domains(report.policies))
    equal, different = report.outputs_equal, report.outputs_different
    console.print(f"Outputs under both policies: {equal} equal, {different} different, token by token.")
    if different:
        console.print("Floating point sums depend on what shares a batch, so near-ties of greedy decoding can flip.")
    for error in report.first_errors:
        console.print(f"error: {error}", style="red", markup=False)
    console.print(_NOTE)


def _policies(policies: tuple[PolicyReport, ...]) -> Table:
    table = Table(Column("policy", no_wrap=True), title="Requests")
    for heading in ("TPOT P50", "TPOT P99", "TTFT P50", "decode CPU / token", "share per engine", "errors"):
        table.add_column(heading, justify="right")
    for report in policies:
        shares = ", ".join(f"{share:.0%}" for share in report.worker_shares.values())
        times = (report.tpot_p50_ms, report.tpot_p99_ms, report.ttft_p50_ms, report.decode_cpu_ms_per_token)
        table.add_row(report.policy, *map(_ms, times), shares, f"{report.errors} of {report.requests}")
    return table


def _domains(policies: tuple[PolicyReport, ...]) -> Table:
    table = Table(Column("policy", no_wrap=True), title="Share of each domain on the decode engine that got most of it")
    for label in policies[0].domain_shares:
        table.add_column(label, justify="right")
    for report in policies:
        shares = [report.domain_shares.get(label) for label in policies[0].domain_shares]
        table.add_row(report.policy, *("-" if share is None else f"{share:.0%}" for share in shares))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"
