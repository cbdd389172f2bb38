"""What it takes to get the experts from where they are to where they would better be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from coterie.experts.members import Held, Server
from coterie.experts.monitor.messages import Move

Table = npt.NDArray[np.bool_]
"""`[R, L, E]`: whether a server has an expert of a layer."""


def table(held: Sequence[Held], experts: int) -> Table:
    """The table of what each server has, of layers of so many experts."""
    found = np.zeros((len(held), len(held[0]), experts), bool)
    for server, layers in enumerate(held):
        for layer, ids in enumerate(layers):
            found[server, layer, list(ids)] = True
    return found


def keeping_most(now: Table, then: Table) -> Table:
    """The same sets of experts, layer by layer, given to those servers that lack least of them.

    Servers that get as many experts of a layer are equals: which of them gets which set changes no load but its owner.
    """
    result = np.empty_like(then)
    for layer in range(then.shape[1]):
        sizes = then[:, layer].sum(axis=1)
        for size in np.unique(sizes):
            equals = np.flatnonzero(sizes == size)
            common = now[equals, layer].astype(np.int64) @ then[equals, layer].T
            owners, sets = linear_sum_assignment(common, maximize=True)
            result[equals[owners], layer] = then[equals[sets], layer]
    return result


def moves(servers: Sequence[Server], now: Table, then: Table) -> list[Move]:
    """What each server would have to be given: from one that gives it up if there is one, else from any that has it."""
    layers = then.shape[1]
    given: dict[tuple[str | None, str], list[list[int]]] = {}
    gives_up = now & ~then
    for target, layer, expert in np.argwhere(then & ~now).tolist():
        source = _first(gives_up[:, layer, expert])
        if source is None:
            source = _first(now[:, layer, expert])
        else:
            gives_up[source, layer, expert] = False  # each replica goes once
        key = None if source is None else servers[source].id, servers[target].id
        given.setdefault(key, [[] for _ in range(layers)])[layer].append(expert)
    return [Move(source, target, tuple(map(tuple, experts))) for (source, target), experts in given.items()]


def _first(which: npt.NDArray[np.bool_]) -> int | None:
    return int(which.argmax()) if which.any() else None
