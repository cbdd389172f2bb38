"""The command lines of a local cluster's expert servers, and of their monitor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from coterie.errors import ConfigError
from coterie.model_config import read_model_config
from coterie.up.config import ExpertsConfig


def monitor_command(host: str, port: int) -> tuple[str, ...]:
    """The command of the monitor."""
    return (sys.executable, "-m", "coterie", "experts", "monitor", "--host", host, "--port", str(port))


def server_command(
    config: ExpertsConfig, model: str, name: str, experts: str, monitor: str, host: str, port: int
) -> tuple[str, ...]:
    """The command of one expert server; the section's own arguments come last, so that they win."""
    what = ("--experts", experts, "--name", name, "--monitor", monitor)
    where = ("--host", host, "--port", str(port))
    return (sys.executable, "-m", "coterie", "experts", "serve", model, *what, *where, *config.args)


def expert_shares(config: ExpertsConfig, model: str) -> list[str]:
    """Which experts of every layer each server has, as `coterie experts serve` is told.

    With S servers the experts are cut into S runs; server i has its own run and those of the servers after it, as many
    as there are replicas.  So when a server is lost, several others share what it did.

    Raises:
        ConfigError: there are more servers than experts.
        InputError: the model's configuration cannot be read.
    """
    total = read_model_config(Path(model)).geometry.experts
    if config.servers > total:
        raise ConfigError(f"experts: {config.servers} servers for {total} experts of a layer; use {total} at most")
    cuts = [total * number // config.servers for number in range(config.servers + 1)]
    runs = [f"{first}-{after - 1}" for first, after in pairwise(cuts)]
    return [",".join(_around(runs, number, config.replicas)) for number in range(config.servers)]


def _around(runs: Sequence[str], first: int, count: int) -> list[str]:
    """So many from the first one on, the beginning following the end; in their own order."""
    places = sorted((first + step) % len(runs) for step in range(count))
    return [runs[place] for place in places]
