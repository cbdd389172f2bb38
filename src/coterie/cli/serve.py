"""`coterie serve`: the gateway in front of running engines."""

from __future__ import annotations

import logging
import sys
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import click

from coterie.cli.logs import log_to_stderr
from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.config import FIELDS, GatewayConfig, Source
from coterie.gateway.processes.parent import run_processes
from coterie.gateway.server import Serving, run


def _option(name: str, hint: Any) -> click.Option:
    """The flag for one field of the configuration; its default stays with the configuration."""
    flag = "--" + name.replace("_", "-")
    text = FIELDS[name].metadata["help"]
    default = FIELDS[name].default
    shown = "" if default is None or default == () else f" [default: {default}]"
    if hint is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=text + shown)
    if typing.get_origin(hint) is tuple:
        return click.Option([flag, name], multiple=True, metavar="URL", help=text)
    if typing.get_origin(hint) is typing.Literal:
        return click.Option([flag, name], type=click.Choice(typing.get_args(hint)), help=text + shown)
    kind = next((kind for kind in (int, float) if kind in (hint, *typing.get_args(hint))), str)
    return click.Option([flag, name], type=kind, help=text + shown)


def _serve(config: str | None, **flags: Any) -> None:
    """Run the gateway in front of running engines.

    Every flag can also be a key of the YAML file given with --config, with underscores for dashes; a flag
    counts more than the file.  SIGHUP has a running gateway read that file again, see `coterie reload`.
    """
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    source = Source(config, given)
    processes = source.read().processes
    set_up_logging()
    if processes == 1:
        run(source, VllmNixl(), on_ready=lambda served: _announce(describe(served)))
    else:
        command = [sys.executable, "-m", "coterie.cli.serve_process"]
        run_processes(source, command, on_ready=_announce)


def set_up_logging() -> None:
    """Everything to stderr; requests as bare lines of JSON."""
    log_to_stderr("httpx")
    bare = logging.StreamHandler(sys.stderr)
    bare.setFormatter(logging.Formatter("%(message)s"))
    requests = logging.getLogger("coterie.requests")
    requests.addHandler(bare)
    requests.propagate = False


def _announce(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


def describe(served: Serving) -> Iterator[str]:
    """One line each: mode, workers, policies, profile, addresses."""
    gateway = served.gateway
    config, profile = gateway.config, served.changes.inputs.profile
    yield "mode      disaggregated, in vLLM's protocol (kv_transfer_params): decode worker chosen after prefill"
    for worker in gateway.workers:
        yield f"worker    {worker.name} {worker.url} {worker.condition}"
    assert gateway.prefill.policy is not None
    assert gateway.decode.policy is not None
    yield f"policy    prefill: {gateway.prefill.policy.name}, decode: {gateway.decode.policy.name}"
    if profile is not None:
        yield f"profile   {config.profile}: {profile.model}, {profile.geometry}, {profile.clusters} centroids"
    else:
        yield "profile   none"
    for url in config.peer:
        yield f"peer      {url}"
    yield f"serving   {served.url}"
    yield f"admin     {served.admin_url}/metrics /workers /decisions /policies /config /peers /health"


_hints = typing.get_type_hints(GatewayConfig)
serve = click.Command(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    params=[
        click.Option(["--config"], metavar="FILE", help="YAML file with these settings."),
        *(_option(name, _hints[name]) for name in FIELDS),
    ],
)
