"""The command line: one file per verb."""

from __future__ import annotations

import sys
from typing import Any

import click

from coterie import __version__
from coterie.cli.verbs import Verbs
from coterie.errors import CoterieError
from coterie.report.tables import printable

_VERBS = {
    "serve": "run the gateway in front of running engines",
    "workers": "see, add, drain and remove the workers of a running gateway",
    "reload": "have a running gateway read its configuration and profile again",
    "key": "make an API key for a client of the gateway",
    "engine": "run one worker of the small engine that coterie brings along",
    "experts": "run expert servers and their monitor, and see how they are doing",
    "up": "run a local cluster: engines and gateway from one YAML file",
    "collect": "record which experts a set of prompts uses",
    "fit": "fit a routing profile from a recorded trace",
    "inspect": "say whether routing by locality is worth it, and why",
    "demo": "compare routing policies on a local cluster",
    "simulate": "compare policies on a simulated cluster, from a recorded trace",
    "reproduce": "simulate the figures of ELDR, and set them beside what was published",
}


@click.group(cls=Verbs, verbs=_VERBS, module="coterie.cli.{}", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coterie")
def _coterie() -> None:
    """Expert-locality-aware decode routing for disaggregated Mixture-of-Experts serving."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; an expected error is one message on stderr and exit status 1."""
    try:
        return _coterie(arguments, prog_name="coterie")
    except CoterieError as error:
        said = "\n".join(map(printable, str(error).split("\n")))  # words of servers and files may be in it
        click.echo(f"coterie: {said}", err=True)
        sys.exit(1)
