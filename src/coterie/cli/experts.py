"""`coterie experts`: one file per verb."""

from __future__ import annotations

import click

from coterie.cli.verbs import Verbs

_VERBS = {
    "serve": "run a server of some of a model's experts",
    "monitor": "run the process that knows which expert servers there are",
    "bench": "measure how fast the servers reply",
    "status": "show expert servers, their load and the experts' replicas",
    "demo": "kill an expert server under load, and add one",
}


@click.group(cls=Verbs, verbs=_VERBS, module="coterie.cli.experts_{}")
def experts() -> None:
    """Run and watch expert servers, and the monitor that knows them."""
