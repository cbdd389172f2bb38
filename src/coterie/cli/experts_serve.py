"""`coterie experts serve`."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

# Read when numpy loads: its products are small, and servers share the cores among themselves.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from coterie.cli.logs import log_to_stderr
from coterie.experts.server.kernels import KernelName
from coterie.experts.server.process import ServeConfig, ServerProcess, run

_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--experts",
    default="all",
    show_default=True,
    metavar="WHICH",
    help="Experts to have: 0-31,40 of every layer; 0:0-31;1:32-63 of single MoE layers, counted from 0; or all.",
)
@click.option("--name", default="experts", show_default=True, help="What people call this server.")
@click.option(
    "--kernel",
    type=click.Choice(typing.get_args(KernelName)),
    default="coterie",
    show_default=True,
    help="What computes: the embedded engine's code, vLLM's for CPUs, torch's or Triton's; the last three need torch.",
)
@click.option(
    "--pairs-per-s",
    type=click.FloatRange(min=0, min_open=True),
    help="The most pairs of token and expert to compute in a second, for trials on one machine. [default: no limit]",
)
@click.option("--monitor", metavar="URL", help="The monitor that tells clients of it. [default: none]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of its HTTP side.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of it. [default: a free one]")
@click.option("--tcp-port", type=click.IntRange(0, 65535), help="Port for clients of other hosts. [default: none]")
@click.option("--tcp-host", help="Address for them, on a network that is trusted. [default: that of the HTTP side]")
@click.option("--nixl", is_flag=True, help="Take requests by NIXL, too, on a network that is trusted.")
@click.option("--slots", type=_POSITIVE, default=16, show_default=True, help="Requests that can be there at a time.")
@click.option("--max-tokens", type=_POSITIVE, default=512, show_default=True, help="Most tokens of a request.")
@click.option(
    "--drain",
    "drain_s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="The longest to serve on after SIGTERM, for clients that still ask.",
)
def serve(**options: Any) -> None:
    """Serve experts of the checkpoint in the folder MODEL, until SIGTERM or Ctrl-C.

    It loads no other experts.  Clients of this host hand it tokens through shared memory, those of others by NIXL or by
    TCP, if it is told so; /config says where.
    """
    log_to_stderr()
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("experts", total=None)
        run(
            ServeConfig(**options),
            on_ready=_announce(bar),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _announce(bar: Progress) -> Callable[[str, ServerProcess], None]:
    def announce(url: str, process: ServerProcess) -> None:
        bar.stop()
        count = sum(map(len, process.held))
        kernel = process.serving.server.kernel.name if process.serving else ""
        tcp = "{} port {}".format(*process.tcp.address) if process.tcp else "no TCP"
        nixl = ", by NIXL" if process.nixl else ""
        click.echo(
            f"serving   {count} experts of {process.model_name} at {url}, kernel {kernel}, requests by "
            f"{process.shared.path} and {tcp}{nixl}"
        )

    return announce
