"""`coterie demo`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.cli.show import show
from coterie.cli.up import default_engine_env, interrupt, show_states
from coterie.engines.embedded.kv import PREFIX as KV
from coterie.experts.transport.shared import PREFIX as EXPERTS
from coterie.files import check_target
from coterie.report import svg
from coterie.report.page import write
from coterie.routing import DECODE_POLICIES
from coterie.shm import sweep
from coterie.up.cluster import Cluster
from coterie.up.config import ClusterConfig, load_cluster_config
from coterie.up.demo import DEFAULT_MIXES, MIXES, POLICIES, DemoOptions, DemoResult, draw_schedule, run_demo
from coterie.up.demo.page import as_json, headlines, page, tables

_PATH = click.Path(path_type=Path)
_EXAMPLES = Path("examples/demo")
_WIDTH = 140


def _read_names(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(value.split(","))


@click.command()
@click.option("--engine", type=click.Choice(("embedded", "vllm")), default="embedded", show_default=True, help="Which.")
@click.option(
    "--cluster", "file", type=_PATH, help="Cluster file; its `gateway` part is not used.  [default: by engine]"
)
@click.option("--calibrate", type=_PATH, default=_EXAMPLES / "calibrate.jsonl", help="Prompts to collect and fit from.")
@click.option("--serve", type=_PATH, default=_EXAMPLES / "serve.jsonl", help="Prompts to serve, with labels.")
@click.option("--requests", default=96, show_default=True, type=click.IntRange(1), help="Of a round, for each policy.")
@click.option("--concurrency", default=96, show_default=True, type=click.IntRange(1), help="Requests in flight.")
@click.option("--max-tokens", default=20, show_default=True, type=click.IntRange(2), help="Output tokens of each.")
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1), help="Rounds of each mix.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(1), help="Of all rounds, for the spread.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Of choices by chance, and of the fit."
)
@click.option(
    "--policies",
    callback=_read_names,
    default=",".join(POLICIES),
    show_default=True,
    help=f"To compare, of {', '.join(DECODE_POLICIES)}.",
)
@click.option(
    "--mixes",
    callback=_read_names,
    default=",".join(DEFAULT_MIXES),
    show_default=True,
    help=f"Of domains, of {', '.join(MIXES)}; drifting: two of them, from the middle of each round on two others.",
)
@click.option("--json", "json_file", type=_PATH, help="Write the result to this file.")
@click.option("--html", type=_PATH, help="Write a report to open in a browser; needs matplotlib.")
def demo(engine: str, file: Path | None, json_file: Path | None, html: Path | None, **given: Any) -> None:
    """Compare routing policies on a local cluster.

    Starts prefill and decode engines, collects a trace and fits a profile, then serves the same requests under every
    policy, on several mixes of domains.  Defaults are found from the root of a checkout.
    """
    signal.signal(signal.SIGTERM, interrupt)
    options = DemoOptions(**given)
    config = load_cluster_config(file or _EXAMPLES / f"{engine}.yaml", engine_env=default_engine_env())
    if html:
        svg.check()
    for path in filter(None, (json_file, html)):
        check_target(path, [options.calibrate, options.serve])
    schedule = draw_schedule(options)
    console = Console(stderr=True)
    with scratch(config) as config:
        cluster = Cluster(config)
        try:
            with show_states(cluster, console):
                cluster.start()
            with _DemoProgress(console) as progress:
                result = run_demo(cluster, options, schedule, progress)
        finally:
            cluster.stop()
        _write(result, options, json_file, html)
    show(headlines(result), tables(result), _WIDTH)
    for path in filter(None, (json_file, html)):
        click.echo(f"wrote {path}")
    if result.first_errors:
        for error in result.first_errors:
            click.echo(f"coterie: {error}", err=True)
        sys.exit(1)


@contextmanager
def scratch(config: ClusterConfig) -> Iterator[ClusterConfig]:
    """The configuration with a run folder of its own, without gateway; removed, but for its logs after an error."""
    folder = config.run_dir / f"demo-{os.getpid()}"
    keep = False
    try:
        yield replace(config, run_dir=folder, gateway=None)
    except Exception:
        keep = True
        raise
    finally:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # no process is left: let nothing stop the rest
        for prefix in (KV, EXPERTS):
            sweep(prefix)  # a second Ctrl-C kills engines, which then cannot remove their shared memory
        shutil.rmtree(folder / "weights" if keep else folder, ignore_errors=True)
        with suppress(OSError):  # other things are in it, such as the results
            config.run_dir.rmdir()
        signal.signal(signal.SIGINT, handler)


def _write(result: DemoResult, options: DemoOptions, json_file: Path | None, html: Path | None) -> None:
    if json_file:
        write(json_file, json.dumps(as_json(result, options), indent=2) + "\n")
    if html:
        write(html, page(result, options))


class _DemoProgress:
    """One progress bar a step, on stderr; where that is no terminal, a line a step.  A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = not console.is_terminal
        columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, disable=self._lines)
        self._task = self._bar.add_task("", visible=False)
        self._title = ""

    def step(self, title: str) -> None:
        """End the bar of the last step and show a new one."""
        self._bar.update(self._task, description=self._title)
        self._bar.stop_task(self._task)
        self._title = title
        self._task = self._bar.add_task(title, total=None)
        if self._lines:
            self.notice(title)

    def detail(self, text: str) -> None:
        """Say what of the step is done now."""
        self._bar.update(self._task, description=f"{self._title} {text}")
        if self._lines:
            self.notice(f"{self._title} {text}")

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
