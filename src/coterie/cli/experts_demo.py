"""`coterie experts demo`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from coterie.calibration.prompts import read_prompts
from coterie.cli.demo import scratch
from coterie.cli.experts_status import servers
from coterie.cli.show import drawn, show
from coterie.cli.up import default_engine_env, interrupt, show_states
from coterie.errors import ConfigError
from coterie.report.tables import Table, number
from coterie.up.cluster import Cluster
from coterie.up.config import load_cluster_config
from coterie.up.experts_demo import DemoOptions, ExpertsDemo, Phase, phases

_PATH = click.Path(path_type=Path)
_EXAMPLES = Path("examples/demo")
_WIDTH = 120
_LINES = 12  # of the diary, in the live view
_RATE_S = 2.0  # over which tokens in a second are counted there


@click.command()
@click.option("--cluster", "file", type=_PATH, default=_EXAMPLES / "experts.yaml", help="Cluster file with `experts`.")
@click.option("--prompts", type=_PATH, default=_EXAMPLES / "serve.jsonl", help="Prompts to serve, again and again.")
def demo(file: Path, prompts: Path) -> None:
    """Kill an expert server under load, and add one; less than a minute.

    Two engines, for prefill and decode, are the clients of four expert servers, each expert on two of them.  The view
    says what is done to the servers and what becomes of them.  Defaults are found from the root of a checkout.
    """
    signal.signal(signal.SIGTERM, interrupt)
    config = load_cluster_config(file, engine_env=default_engine_env())
    if config.experts is None or config.gateway is None:
        raise ConfigError(f"{file}: the demo needs `experts` and `gateway`")
    asked = read_prompts(prompts).prompts
    console = Console(stderr=True)
    with scratch(config) as own:
        cluster = Cluster(replace(own, gateway=config.gateway))
        try:
            with show_states(cluster, console):
                cluster.start()
            run = ExpertsDemo(cluster, asked, DemoOptions())
            with _watching(run, console):
                asyncio.run(run.run())
        finally:
            cluster.stop()
    _report(run)


@contextmanager
def _watching(run: ExpertsDemo, console: Console) -> Iterator[None]:
    """Show the run on stderr; where that is no terminal, only the diary, line by line."""
    if console.is_terminal:
        with Live(get_renderable=lambda: _view(run), console=console, refresh_per_second=4):
            yield
        return
    run.tell = lambda at_s, text: console.print(_line(at_s, text), highlight=False, markup=False, soft_wrap=True)
    yield


def _view(run: ExpertsDemo) -> Group:
    now_s = run.now()
    seen = run.load.seen
    rate = seen.rate(max(0.0, now_s - _RATE_S), now_s) if now_s > 0 else 0.0
    clients = f"{run.status.followers} clients, " if run.status else ""
    counts = f"{clients}{len(seen.finished)} requests answered, {len(seen.errors)} failed"
    head = Text(f"{now_s:5.1f} s   {rate:4.0f} tokens/s   {counts}", style="bold")
    rows = drawn(servers(run.status.servers)) if run.status else Text()
    diary = [Text(_line(at_s, text), style=_style(text)) for at_s, text in run.diary[-_LINES:]]
    return Group(head, Text(), rows, Text(), *diary)


def _style(text: str) -> str:
    return "bold red" if text.startswith("KILLED") else "bold green" if text.startswith("STARTING") else ""


def _line(at_s: float, text: str) -> str:
    return f"{at_s:6.1f} s  {text}"


def _report(run: ExpertsDemo) -> None:
    found = phases(run.marks, run.ended_s, run.load.seen)
    errors = [error for _, error in run.load.seen.errors]
    answered = len(run.load.seen.finished)
    show((f"{answered} requests answered, {len(errors)} failed",), (_table(found),), _WIDTH)
    if errors:
        for error in sorted(set(errors)):
            click.echo(f"coterie: {error}", err=True)
        sys.exit(1)


def _table(found: list[Phase]) -> Table:
    columns = ("from then on", ">at s", ">for s", ">tokens/s", ">longest pause ms", ">answered", ">failed")
    rows = tuple(
        (
            phase.name,
            number(phase.from_s, 1),
            number(phase.to_s - phase.from_s, 1),
            number(phase.tokens_per_s, 0),
            number(1000 * phase.longest_pause_s, 0),
            str(phase.finished),
            str(phase.failed),
        )
        for phase in found
    )
    note = (
        "longest pause: between two tokens of one stream. All processes share this machine's cores, so that servers "
        "more or less do not show in tokens/s."
    )
    return Table("what clients saw", columns, rows, note)
