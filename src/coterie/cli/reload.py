"""`coterie reload`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from coterie.cli.admin_client import Admin, asks_admin, tell
from coterie.gateway.admin.api import Reloaded


@click.command()
@asks_admin
def reload(admin: Admin, as_json: bool) -> None:
    """Have a running gateway read its configuration, profile and trace again.

    Whatever is wrong with one of them is told, and the gateway goes on as it was.
    """
    tell(admin.ask("POST", "reload", reply=Reloaded), as_json=as_json, say=_said)


def _said(change: Reloaded) -> str:
    what: dict[str, Sequence[str]] = {
        "settings changed": change.settings,
        "workers added": change.added,
        "workers leaving": change.removed,
        "policies made anew": change.policies,
    }
    told = [f"{title}: {', '.join(names)}" for title, names in what.items() if names] or ["nothing has changed"]
    return "\n".join([f"configuration {change.generation} is in effect", *told])
