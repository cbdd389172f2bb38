"""`coterie engine`: one worker of the embedded engine."""

from __future__ import annotations

import os
import signal
import sys
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

# Read when numpy loads: its products are small, and workers share the cores among themselves.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from coterie.cli.logs import log_to_stderr
from coterie.engines.embedded.process import DEFAULT_KV_MEMORY_MIB, WorkerConfig, run
from coterie.engines.embedded.pulls import Transport
from coterie.engines.embedded.worker import WorkerRole
from coterie.experts.client.model_experts import TIMEOUT_S, ExpertsConfig, experts_of
from coterie.modeling import RemoteExperts

_POSITIVE = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)
_PORT = click.IntRange(0, 65535)


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--served-model-name", metavar="NAME", help="What clients call the model. [default: the folder's name]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on.")
@click.option("--port", type=_PORT, default=8000, show_default=True, help="Port to serve on; 0 takes a free one.")
@click.option(
    "--role",
    type=click.Choice(typing.get_args(WorkerRole)),
    default="both",
    show_default=True,
    help="Which parts of a divided request it takes.",
)
@click.option(
    "--weights-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the packed weights, shared by all workers of the machine. [default: below the cache folder]",
)
@click.option(
    "--pad-intermediate",
    type=_POSITIVE,
    metavar="N",
    help="Pad each expert with zeros to N columns, so that decoding costs what reading the active experts costs.",
)
@click.option("--block-size", type=_POSITIVE, default=16, show_default=True, help="Tokens of a KV block.")
@click.option("--kv-blocks", type=_POSITIVE, help="Blocks of the KV cache; instead of --kv-memory.")
@click.option(
    "--kv-memory",
    "kv_memory_mib",
    type=_POSITIVE,
    metavar="MIB",
    help=f"Memory of the KV cache. [default: {DEFAULT_KV_MEMORY_MIB}]",
)
@click.option("--max-model-len", type=_POSITIVE, help="Most tokens of prompt and output. [default: the model's]")
@click.option("--max-num-seqs", type=_POSITIVE, default=64, show_default=True, help="Most requests that run at once.")
@click.option("--max-batched-tokens", type=_POSITIVE, default=512, show_default=True, help="Most tokens of a step.")
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="Find KV again by its tokens. [default: yes]")
@click.option(
    "--kv-host", default="127.0.0.1", show_default=True, help="Address where decode workers ask this one for KV."
)
@click.option("--kv-port", type=_PORT, default=0, help="Port of it. [default: a free one]")
@click.option(
    "--kv-transport",
    type=click.Choice(typing.get_args(Transport)),
    default="auto",
    show_default=True,
    help="How KV of others is fetched; auto takes shared memory on one host, else TCP.",
)
@click.option(
    "--kv-lease",
    "kv_lease_s",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a finished prompt's KV waits for a decode worker.",
)
@click.option(
    "--kv-timeout",
    "kv_timeout_s",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest that fetching KV, or giving it to a peer that has stopped taking, may take.",
)
@click.option(
    "--log-steps",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="CSV",
    help="Write measured decode steps here, for `coterie simulate --steps`; workers may share the file.",
)
@click.option(
    "--experts-from",
    metavar="URL",
    help="Monitor of the expert servers that compute the routed experts; none is loaded here. [default: all are]",
)
@click.option(
    "--experts-timeout",
    "experts_timeout_s",
    type=_SECONDS,
    metavar="SECONDS",
    help=f"The longest to wait for the experts of a layer; then the step's requests fail. [default: {TIMEOUT_S:g}]",
)
@click.option(
    "--experts-overlap",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Compute steps of at least so many tokens as two halves: while one waits for expert servers, the engine "
    "computes the other. [default: never]",
)
def engine(model: Path, served_model_name: str | None, **options: Any) -> None:
    """Run one worker of the embedded engine on the checkpoint in the folder MODEL, until Ctrl-C.

    It serves OpenAI's endpoints, and takes part in disaggregated serving as vLLM with NIXL does.  The checkpoint is
    converted to packed weights the first time.
    """
    if options["kv_blocks"] and options["kv_memory_mib"]:
        raise click.UsageError("--kv-blocks and --kv-memory exclude one another")
    experts = _experts(model, options.pop("experts_from"), options.pop("experts_timeout_s"), options)
    given = {name: value for name, value in options.items() if value is not None}
    config = WorkerConfig(model, served_model_name or model.resolve().name, **given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while weights are converted, it ends as Ctrl-C does
    log_to_stderr()
    with experts as remote, Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        run(config, on_ready=_announce(config, bar), progress=_shown(bar), experts=remote)


def _experts(
    model: Path, monitor: str | None, timeout_s: float | None, others: Mapping[str, Any]
) -> AbstractContextManager[RemoteExperts | None]:
    """What computes the routed experts, if this process does not."""
    if monitor is None:
        for option, value in {"--experts-timeout": timeout_s, "--experts-overlap": others["experts_overlap"]}.items():
            if value is not None:
                raise click.UsageError(f"{option} is of use with --experts-from only")
        return nullcontext()
    if others["pad_intermediate"]:
        raise click.UsageError("--pad-intermediate and --experts-from exclude one another: no expert is loaded here")
    return experts_of(model, ExpertsConfig(monitor, f"engine {os.getpid()}", timeout_s or TIMEOUT_S))


def _announce(config: WorkerConfig, bar: Progress) -> Callable[[str, str], None]:
    def announce(url: str, kernel: str) -> None:
        bar.stop()
        click.echo(
            f"serving   {config.served_model_name} ({config.model}) at {url}, role {config.role}, kernel {kernel}"
        )

    return announce


def _shown(bar: Progress) -> Callable[[int, int], None]:
    task = bar.add_task("weights", total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)
