"""`coterie collect`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.activations import ActivationTrace
from coterie.calibration.client import EngineClient
from coterie.calibration.collect import CollectOptions, run_collect
from coterie.calibration.source import Source
from coterie.calibration.sources.checkpoint import CheckpointSource
from coterie.calibration.sources.loading import DEVICES, DTYPES, CheckpointOptions
from coterie.calibration.sources.plugin import PluginSource
from coterie.calibration.sources.routed import RoutedSource
from coterie.errors import ConfigError
from coterie.model_config import read_model_config
from coterie.report.tables import printable

_OPTIONAL = ("decode_ids", "gate_prob", "gate_logit")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Where the counts come from.

    Attributes:
        server: base URL of a server.
        checkpoint: a folder, or a name on the Hugging Face hub.
        device: where to run the checkpoint, one of `DEVICES`; None for `auto`.
        dtype: its numbers, one of `DTYPES`; None for `auto`.
        ids: record the expert ids of output tokens as well (a server with the plugin).
        routed_experts: read the routed experts that a stock server returns.
        model_config: the model's `config.json`, or its folder; with `routed_experts`.
        model: name of the model at the server, or for the trace of a checkpoint.
    """

    server: str | None
    checkpoint: str | None
    device: str | None
    dtype: str | None
    ids: bool
    routed_experts: bool
    model_config: Path | None
    model: str | None


@click.command()
@click.option(
    "--server", help="Base URL of a server, without /v1: vLLM with coterie's plugin, or see --routed-experts."
)
@click.option("--checkpoint", help="A checkpoint to run here with transformers: a folder, or a name on the hub.")
@click.option("--device", type=click.Choice(DEVICES), help="Where to run it.  [default: auto]")
@click.option("--dtype", type=click.Choice(DTYPES), help="In which numbers; auto takes its own.  [default: auto]")
@click.option("--ids", is_flag=True, help="Record the expert ids of each output token too; from the plugin.")
@click.option("--routed-experts", is_flag=True, help="The server is stock vLLM or SGLang and returns routed experts.")
@click.option("--model-config", type=click.Path(path_type=Path), help="The model's config.json, for --routed-experts.")
@click.option("--prompts", required=True, type=click.Path(path_type=Path), help="Prompt file, JSON lines.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Trace to write.")
@click.option("--model", help="Name of the model; needed where a server serves several.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Output tokens per prompt.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1), help="Requests in flight.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the order of sending.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--force", is_flag=True, help="Replace an existing trace and what was begun with other settings.")
def collect(as_json: bool, **given: Any) -> None:
    """Record which experts a set of prompts uses.

    A line of the prompt file is {"prompt": TEXT} or {"messages": [...]}, with an optional "label".  Outputs are
    greedy and ignore the end-of-text token, so that all have --max-tokens tokens.

    What is finished is kept in OUTPUT.partial: after a crash or Ctrl-C, the same command goes on from there.
    """
    wanted = SourceOptions(**{field.name: given.pop(field.name) for field in fields(SourceOptions)})
    chosen = CollectOptions(**given)
    _check(wanted)
    try:
        with CollectProgress() as progress:
            source = _source(wanted, progress.notice)
            trace = asyncio.run(run_collect(source, chosen, progress))
    except KeyboardInterrupt:
        click.echo("interrupted; the same command goes on from what is finished", err=True)
        sys.exit(130)
    summary = _summary(chosen.output, trace)
    click.echo(json.dumps(summary) if as_json else "\n".join(f"{name:16} {_shown(summary[name])}" for name in summary))


def _check(options: SourceOptions) -> None:
    """Refuse options that contradict one another."""
    if (options.server is None) == (options.checkpoint is None):
        raise ConfigError("name one source: --server URL or --checkpoint FOLDER")
    if options.checkpoint is None and (options.device or options.dtype):
        raise ConfigError("--device and --dtype are for --checkpoint; a server has its own")
    if options.checkpoint is not None and (options.ids or options.routed_experts):
        raise ConfigError("--checkpoint always records ids; leave --ids and --routed-experts out")
    if options.routed_experts and options.ids:
        raise ConfigError("--routed-experts always records ids; leave --ids out")
    if options.routed_experts and options.model_config is None:
        raise ConfigError("--routed-experts needs --model-config: the model's folder, or its config.json")
    if options.model_config is not None and not options.routed_experts:
        raise ConfigError("--model-config is for --routed-experts; nothing else needs it")


def _source(options: SourceOptions, notice: Callable[[str], None]) -> Source:
    """The source that checked options name."""
    if options.checkpoint is not None:
        checkpoint = CheckpointOptions(options.checkpoint, options.device or "auto", options.dtype or "auto")
        return CheckpointSource(checkpoint, notice=notice, model=options.model)
    assert options.server is not None
    client = EngineClient(options.server, notice=notice)
    if options.model_config is not None:
        return RoutedSource(client, read_model_config(options.model_config), options.model)
    return PluginSource(client, options.model, ids=options.ids)


class CollectProgress:
    """A progress bar with the time left, on stderr where that is a terminal; a context manager.

    Attributes:
        console: where notices go.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        columns = (TextColumn("collect"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = not self.console.is_terminal  # in a log, only what is said
        self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console, disable=hidden)
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
        self.console.print(printable(text), highlight=False, markup=False)

    def __enter__(self) -> CollectProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _shown(value: Any) -> str:
    return printable(", ".join(value) if isinstance(value, list) else str(value))


def _summary(path: Path, trace: ActivationTrace) -> dict[str, Any]:
    return {
        "trace": str(path),
        "model": trace.model,
        "geometry": str(trace.geometry),
        "requests": len(trace),
        "partly_covered": int((~trace.complete).sum()),
        "prompt_tokens": int(trace.prefill_tokens.sum()),
        "output_tokens": int(trace.decode_tokens.sum()),
        "recorded": ["counts", *(name for name in _OPTIONAL if getattr(trace, name) is not None)],
    }
