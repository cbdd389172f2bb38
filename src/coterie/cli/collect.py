"""`coterie collect`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.activations import ActivationTrace
from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.sources.plugin import PluginSource


@click.command()
@click.option("--server", required=True, help="Base URL of a server that runs coterie's plugin.")
@click.option("--prompts", required=True, type=click.Path(path_type=Path), help="Prompt file, JSON lines.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Trace to write.")
@click.option("--model", help="Name of the model; needed where the server serves several.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Output tokens per prompt.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1), help="Requests in flight.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the order of sending.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--force", is_flag=True, help="Replace an existing trace and what was begun with other settings.")
def collect(server: str, model: str | None, as_json: bool, **options: Any) -> None:
    """Record which experts a set of prompts uses.

    A line of the prompt file is {"prompt": TEXT} or {"messages": [...]}, with an optional "label".  Outputs are
    greedy and ignore the end-of-text token, so that all have --max-tokens tokens.

    What is finished is kept in OUTPUT.partial: after a crash or Ctrl-C, the same command goes on from there.
    """
    chosen = CollectOptions(**options)
    try:
        with CollectProgress() as progress:
            source = PluginSource(EngineClient(server, notice=progress.notice), model)
            trace = asyncio.run(run_collect(source, chosen, progress))
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on from what is finished", err=True)
        sys.exit(130)
    summary = _summary(chosen.output, trace)
    click.echo(json.dumps(summary) if as_json else "\n".join(f"{name:16} {value}" for name, value in summary.items()))


class CollectProgress:
    """A progress bar with the time left, on stderr; a context manager.

    Attributes:
        console: where notices go.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        columns = (TextColumn("collect"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console)
        self._task = self._bar.add_task("collect", total=None)

    def begin(self, total: int, done: int) -> None:
        """Show how much there is to do, and how much an earlier run did."""
        self._bar.reset(self._task, total=total, completed=done)
        if done:
            self.notice(f"{done} of {total} requests were finished by an earlier run")

    def advance(self) -> None:
        """Count one finished request."""
        self._bar.advance(self._task)

    def notice(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> CollectProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _summary(path: Path, trace: ActivationTrace) -> dict[str, Any]:
    return {
        "trace": str(path),
        "model": trace.model,
        "geometry": str(trace.geometry),
        "requests": len(trace),
        "partly_covered": int((~trace.complete).sum()),
        "prompt_tokens": int(trace.prefill_tokens.sum()),
        "output_tokens": int(trace.decode_tokens.sum()),
    }
