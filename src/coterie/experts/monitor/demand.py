"""How much each expert is asked for, from what the servers count; and where the experts would better be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.experts.members import Held, Server, placed_experts
from coterie.experts.monitor.messages import Load, Suggestion
from coterie.experts.monitor.moves import keeping_most, moves, table
from coterie.placement import balance
from coterie.placement.balance import EVEN

Floats = npt.NDArray[np.float64]

HALF_LIFE_S = 30.0
"""Age at which load counts half."""


@dataclass(slots=True)
class _Seen:
    server: Server
    load: Load
    at_s: float
    rates: Floats  # [L, E] pairs of token and expert in a second


class Demand:
    """The load of each expert on each server, of late.

    Servers report totals, so that a report which is lost loses nothing.  Rates are means over time, in which what is
    `HALF_LIFE_S` old counts half.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def report(self, server: Server, load: Load, now: float) -> None:
        """Take in a server's totals.

        Raises:
            InputError: they are not of its experts, or fall.
        """
        if [len(layer) for layer in load.tokens] != [len(layer) for layer in server.held]:
            raise InputError(f"{server.name}: the load does not have one number for each of its experts")
        seen = self._seen.get(server.id)
        if seen is None or seen.server.held != server.held:
            self._seen[server.id] = _Seen(server, load, now, np.zeros((len(server.held), server.experts)))
            return
        self._average(seen, load, now)

    def _average(self, seen: _Seen, load: Load, now: float) -> None:
        elapsed_s = now - seen.at_s
        if elapsed_s <= 0:
            return
        new = _table(seen.server, load) - _table(seen.server, seen.load)
        if (new < 0).any():
            raise InputError(f"{seen.server.name}: the load fell; it must be counted since the start of the process")
        kept = 0.5 ** (elapsed_s / HALF_LIFE_S)
        seen.rates = kept * seen.rates + (1 - kept) * new / elapsed_s
        seen.load, seen.at_s = load, now

    def forget_all_but(self, ids: set[str]) -> None:
        """Keep the load of these servers alone."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in ids}

    def load(self, key: str) -> Load | None:
        """The last report of a server."""
        seen = self._seen.get(key)
        return seen.load if seen else None

    def rate(self, key: str) -> float:
        """Pairs of token and expert that a server computes in a second."""
        seen = self._seen.get(key)
        return float(seen.rates.sum()) if seen else 0.0

    def rates(self, servers: Sequence[Server]) -> Floats:
        """`[R, L, E]`: pairs in a second, by server.

        Args:
            servers: of one model, at least one.
        """
        nothing = np.zeros((len(servers[0].held), servers[0].experts))
        return np.stack([self._seen[one.id].rates if one.id in self._seen else nothing for one in servers])


def imbalance(loads: Floats) -> float | None:
    """Load of the busiest server over that of the mean one, mean over layers by their load.

    Args:
        loads: `[R, L]`.

    Returns:
        1 if all have the same; None without load.
    """
    total = loads.sum()
    return float(loads.max(axis=0).sum() / (total / len(loads))) if total else None


def suggest(servers: Sequence[Server], rates: Floats) -> Suggestion:
    """A placement for the load of late, on servers that keep their sizes, and the way there; see `placement.balance`.

    A layer that is as even as it would be stays as it is; in others, equals among the servers get what moves least.

    Args:
        servers: those that serve.
        rates: `[R, L, E]` of them.

    Raises:
        InputError: there is no server or no load, or they have fewer places than there are experts.
    """
    loads, load = rates.sum(axis=2), rates.sum(axis=0)
    now = imbalance(loads) if servers else None
    if now is None:
        raise InputError("placement: no server that serves has had any load yet")
    placement = balance(load, [max(map(len, one.held)) for one in servers])
    placed, then = [placed_experts(placement, rank) for rank in range(len(servers))], placement.loads(load).T
    before = table([one.held for one in servers], load.shape[1])
    after = keeping_most(before, table(placed, load.shape[1]))
    stays = (before.sum(axis=0) > 0).all(axis=1) & (loads.max(axis=0) * (1 - EVEN) <= then.max(axis=0))
    after[:, stays] = before[:, stays]
    suggested = imbalance(np.where(stays, loads, then))
    assert suggested is not None
    held = {one.id: _held(rows) for one, rows in zip(servers, after, strict=True)}
    return Suggestion(now, suggested, held, int((after & ~before).sum()), moves(servers, before, after))


def _held(rows: npt.NDArray[np.bool_]) -> Held:
    """Of a table `[L, E]`."""
    return tuple(tuple(np.flatnonzero(row).tolist()) for row in rows)


def _table(server: Server, load: Load) -> Floats:
    """`[L, E]` of what a server counted."""
    table = np.zeros((len(server.held), server.experts))
    for row, experts, tokens in zip(table, server.held, load.tokens, strict=True):
        row[list(experts)] = tokens
    return table
