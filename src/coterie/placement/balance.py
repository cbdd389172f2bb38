"""Placements from measured load: what DeepSeek's EPLB does, on ranks of any size (https://github.com/deepseek-ai/EPLB).

EPLB has two policies.  Global: replicate the busiest experts, pack the replicas evenly onto ranks.  Hierarchical: first
pack groups of experts evenly onto nodes, then do the same within each node, so that a token whose experts are of few
groups (group-limited routing) goes to few nodes.

Beyond EPLB: ranks may hold different numbers of experts; two replicas of an expert are never on one rank; swaps follow
the packing; and the replicas of an expert need not share its load evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.placement.packing import pack
from coterie.placement.placement import Load, Placement, check_load, even_slots
from coterie.placement.replication import replicate
from coterie.placement.sharing import share
from coterie.placement.swapping import swap_while_better

Floats = npt.NDArray[np.float64]

EVEN = 1e-5
"""Swaps and sharing end when they make the busiest rank lighter by no more than this part."""


def balance(load: Load, slots: Sequence[int]) -> Placement:
    """Place experts so that the busiest rank has as little to do as can be found; EPLB's global policy.

    Args:
        load: `[L, E]`.
        slots: `[R]`: experts that each rank holds of each layer, replicas counted, from 1 to E; E in all at least.

    Raises:
        InputError: a load is negative or not finite, slots are too few or too many.
    """
    check_load(load)
    _check_slots(slots, load.shape[1], "experts")
    return _placement([_pack(layer, slots) for layer in load.astype(np.float64)], slots)


def balance_by_node(load: Load, slots: Sequence[int], *, groups: int, nodes: int) -> Placement:
    """Place experts so that each group is whole on one node, each node has as many groups; EPLB's hierarchical policy.

    Args:
        load: `[L, E]`; expert e is of group `e // (E / groups)`.
        slots: `[R]` as for `balance`; the first R / nodes ranks are on node 0, and so on.
        groups: number of groups.
        nodes: number of nodes.

    Raises:
        InputError: as `balance`; groups do not divide experts, or nodes do not divide groups or ranks.
    """
    check_load(load)
    E, R = load.shape[1], len(slots)
    if not slots or groups < 1 or nodes < 1 or E % groups or groups % nodes or R % nodes:
        raise InputError(
            f"placement: {E} experts in {groups} groups, {R} ranks on {nodes} nodes; groups must divide the experts, "
            "and nodes both the groups and the ranks (or use the policy without nodes)"
        )
    of_node = [slots[start : start + R // nodes] for start in range(0, R, R // nodes)]
    for some in of_node:
        _check_slots(some, E // nodes, "experts of a node")
    return _placement([_pack_by_node(layer, of_node, groups) for layer in load.astype(np.float64)], slots)


def balance_without_replicas(use: Load, ranks: int) -> Placement:
    """Place each expert on one rank; each rank holds E / R of a layer, rounded up or down.

    For expert-parallel groups, where a rank reads an expert's weights once for however many tokens: `use` is then the
    chance that a step activates the expert, not its tokens.

    Args:
        use: `[L, E]`.
        ranks: from 1 to E.

    Raises:
        InputError: a use is negative or not finite, or there are more ranks than experts.
    """
    check_load(use)
    return balance(use, even_slots(use.shape[1], ranks))


def _pack(load: Floats, slots: Sequence[int]) -> Floats:
    """`[R, E]` part of each expert's load that each rank takes; NaN where it does not hold the expert."""
    replicas = replicate(load.tolist(), slots)
    holds = pack((load / replicas).tolist(), replicas, slots)
    parts = holds * (load / replicas)
    busiest = np.inf
    while (now := parts.sum(axis=1).max()) < busiest * (1 - EVEN):
        busiest = now
        swap_while_better(parts, holds)
        parts = share(load, holds)
    return np.where(holds, parts, np.nan)


def _pack_by_node(load: Floats, of_node: Sequence[Sequence[int]], groups: int) -> Floats:
    """As `_pack`."""
    of_group = np.arange(len(load)).reshape(groups, -1)
    loads = load[of_group].sum(axis=1).tolist()
    on_node = pack(loads, [1] * groups, [groups // len(of_node)] * len(of_node))
    parts = np.full((sum(map(len, of_node)), len(load)), np.nan)
    first = 0
    for here, slots in zip(on_node, of_node, strict=True):
        experts = of_group[here].ravel()
        parts[first : first + len(slots), experts] = _pack(load[experts], slots)
        first += len(slots)
    return parts


def _placement(parts: Sequence[Floats], slots: Sequence[int]) -> Placement:
    """From the parts of each layer, as `_pack` gives them.

    A load that is tiny beside the others is rounded away as it is poured, so shares are of what was poured.
    """
    rank_of = np.repeat(np.arange(len(slots)), slots)
    experts = np.stack([np.nonzero(~np.isnan(layer))[1] for layer in parts])
    of_slot = np.stack([layer[rank_of, held] for layer, held in zip(parts, experts, strict=True)])
    whole = np.take_along_axis(np.nansum(parts, axis=1), experts, axis=1)
    replicas = (~np.isnan(parts)).sum(axis=1)
    even = 1 / np.take_along_axis(replicas, experts, axis=1)
    return Placement(experts, rank_of, np.divide(of_slot, whole, out=even, where=whole > 0))


def _check_slots(slots: Sequence[int], experts: int, what: str) -> None:
    if not slots or min(slots) < 1 or max(slots) > experts or sum(slots) < experts:
        raise InputError(
            f"placement: slots {list(slots)} for {experts} {what}; each rank needs from 1 to {experts}, "
            f"and all together {experts} at least"
        )
