"""`coterie experts monitor`."""

from __future__ import annotations

from collections.abc import Callable

import click

from coterie.cli.logs import log_to_stderr
from coterie.experts.membership import Timing
from coterie.experts.monitor.process import MonitorConfig, run

_TIMING = Timing()


def _seconds(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for a time of `Timing`."""
    default = getattr(_TIMING, name)
    flag = f"--{name.replace('_', '-')}"
    return click.option(
        flag, type=click.FloatRange(min=0, min_open=True), default=default, show_default=True, help=text
    )


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8100, show_default=True, help="Port of it; 0 takes a free one."
)
@_seconds("heartbeat_s", "Between two heartbeats of a server.")
@_seconds("suspect_after_s", "Silence after which a server gets nothing new while others have its experts.")
@_seconds("dead_after_s", "Silence after which it is dropped, if others have its experts.")
@_seconds("joining_s", "The longest that a server may take from its registration until it is ready.")
@_seconds("forget_after_s", "How long dead servers are shown.")
def monitor(host: str, port: int, **timing: float) -> None:
    """Run the process that knows which expert servers there are, and tells their clients, until Ctrl-C.

    No request passes through it: without it servers and clients go on with what they know.  When it is back, the
    servers register again.
    """
    log_to_stderr()
    config = MonitorConfig(host, port, Timing(**timing))
    run(config, on_ready=lambda url: click.echo(f"monitor   {url}"))
