"""`coterie key`: API keys for the gateway's clients."""

from __future__ import annotations

import click

from coterie.gateway.edge.keys import Key, digest, new_key


@click.group()
def key() -> None:
    """Make API keys for the gateway's clients."""


@key.command()
@click.argument("name")
def new(name: str) -> None:
    """Make a key for NAME: its line for the key file to stdout, the key itself, this once, to stderr.

    `coterie key new alice >> keys.yaml` adds it to the file, in which only its hash is kept; limits can be added to
    the line by hand.
    """
    secret = new_key()
    made = Key(name=name, sha256=digest(secret))
    click.echo(f'- {{name: {made.name}, sha256: "{made.sha256}"}}')
    click.echo(f"key of {name}, not shown again: {secret}", err=True)
