"""Groups of commands whose modules are imported only when they run, so that `--help` is instant."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class Verbs(click.Group):
    """A group that imports a verb's module only when that verb runs.

    Args:
        verbs: what each does.
        module: of a verb, whose name takes the place of the braces.
        named: arguments of every group.
    """

    def __init__(self, *, verbs: Mapping[str, str], module: str, **named: Any) -> None:
        super().__init__(**named)
        self._verbs, self._module = verbs, module

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As click has it."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """As click has it."""
        if cmd_name not in self._verbs:
            return None
        command = getattr(importlib.import_module(self._module.format(cmd_name)), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click has it."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._verbs.items()))
