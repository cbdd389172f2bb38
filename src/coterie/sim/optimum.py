"""The best assignment of a batch, and a bound that no assignment can beat.

    minimise    sum over sets S of |S| T(S) z[S]
    subject to  sum over S that hold i of z[S] = 1   for each request i,     sum of z <= D,     z[S] = 0 or 1

over all sets of at most `most` requests: each worker serves one of them.  With z from 0 to 1 it is a linear program,
whose value is the bound; in practice it is within a fraction of a per cent of the best.  The program has all sets as
columns, of which a few hundred matter: columns are added where the prices say that they would pay (column generation,
with all sets looked at).  A set whose reduced cost is above the gap between a known assignment and the bound is in no
better assignment, so the whole numbers are sought among the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csc_array, vstack

from coterie.errors import InputError
from coterie.sim.oracle import Assignment, Floats, Instance

MOST_SETS = 1_000_000
"""Sets up to which `best_partition` is allowed: as many numbers are looked at in each of some tens of rounds."""

_ROUNDS = 200
_ADDED = 400
_MOST_WHOLE = 20_000
_NODES = 2_000
_CLOSE = 1e-9

Members = npt.NDArray[np.int16]
"""`[sets, most]` requests of each set, filled up with N, which is no request."""


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """What is known of the best assignment of a batch.

    Attributes:
        assignment: the best that is known.
        mean_tpot_s: its mean TPOT.
        bound_s: no assignment has a lower one.
        proven: whether the assignment is the best.
    """

    assignment: Assignment
    mean_tpot_s: float
    bound_s: float
    proven: bool


def count_sets(requests: int, most: int) -> int:
    """How many sets of 1 to `most` requests there are."""
    return sum(comb(requests, size) for size in range(1, most + 1))


def best_partition(instance: Instance, most: int, known: Assignment) -> Best:
    """Find the best assignment of a batch in which no worker holds more than `most` requests.

    Args:
        instance: requests that all decode together.
        most: requests that a worker may hold.
        known: an assignment to begin from; the better it is, the less is left to do (`oracle.best_found`).

    Raises:
        InputError: there are more than `MOST_SETS` sets, the requests do not all decode together, or `known` puts more
            than `most` on a worker.
    """
    N, sets = len(instance), count_sets(len(instance), most)
    if not instance.at_once or sets > MOST_SETS:
        raise InputError(f"oracle: {sets} sets of up to {most} of {N} requests; at most {MOST_SETS}, of one batch")
    if instance.heaviest(known) > most:
        raise InputError(
            f"oracle: the known assignment has {instance.heaviest(known)} requests on a worker, not {most}"
        )
    members, costs = _all_sets(instance, most)
    scale = instance.mean_tpot_s(known)  # the solver's tolerances are for numbers near 1
    reduced, bound = _generate(members, costs / scale, instance, known)
    near = np.flatnonzero(reduced <= N - bound + _CLOSE)
    if N - bound <= _CLOSE or len(near) > _MOST_WHOLE:
        return Best(known, scale, bound * scale / N, N - bound <= _CLOSE)
    found, proven = _in_whole(members[near], costs[near] / scale, instance)
    if found is None or instance.mean_tpot_s(found) > scale:
        found = known
    mean_s = instance.mean_tpot_s(found)
    return Best(found, mean_s, mean_s if proven else bound * scale / N, proven)


def _all_sets(instance: Instance, most: int) -> tuple[Members, Floats]:
    """All sets of up to `most` requests, and |S| T(S) of each."""
    parts = [_sets_from(instance, first, most) for first in range(len(instance))]
    return np.concatenate([members for members, _ in parts]), np.concatenate([costs for _, costs in parts])


def _sets_from(instance: Instance, first: int, most: int) -> tuple[Members, Floats]:
    """Those whose smallest member is `first`, size by size: each set is a smaller one and a member behind its last.

    The idle experts of a set of the last size are a scalar product, so their products are never made one by one.
    """
    N, F = instance.idle.shape
    members = np.full((1, most), N, dtype=np.int16)
    members[0, 0] = first
    products, left = instance.idle[first : first + 1], instance.idle[first : first + 1].sum(axis=1)
    found, costs = [members], [_cost(instance, 1, F - left)]
    for size in range(2, most + 1):
        scalar = products @ instance.idle.T  # (sets, N)
        parent, member = np.nonzero(np.arange(N) > members[:, size - 2, None])
        members = members[parent]
        members[:, size - 1] = member
        found.append(members)
        costs.append(_cost(instance, size, F - scalar[parent, member]))
        if size < most:
            products = products[parent] * instance.idle[member]
    return np.concatenate(found), np.concatenate(costs)


def _cost(instance: Instance, size: int, active: Floats) -> Floats:
    costs: Floats = size * (instance.base_s[size] + instance.expert_s * active)
    return costs


def _generate(members: Members, costs: Floats, instance: Instance, known: Assignment) -> tuple[Floats, float]:
    """Solve the linear program.

    Returns:
        reduced cost of each set, and the bound.  Any prices give one: the sum of the requests' prices, and D times the
        cheapest reduced cost if that is below zero.
    """
    N, D = len(instance), instance.workers
    chosen = _columns_of(members, known)
    best, best_reduced = -np.inf, costs
    for _ in range(_ROUNDS):
        prices, wage = _prices(members[chosen], costs[chosen], N, D)
        reduced = costs - np.append(prices, 0.0)[members].sum(axis=1) - wage
        bound = float(prices.sum() + D * wage + D * min(reduced.min(), 0.0))
        if bound > best:
            best, best_reduced = bound, reduced - min(reduced.min(), 0.0)
        if reduced.min() >= -_CLOSE * costs.max():
            break
        cheap = np.argpartition(reduced, min(_ADDED, len(reduced) - 1))[:_ADDED]
        chosen = np.union1d(chosen, cheap[reduced[cheap] < 0])
    return best_reduced, best


def _columns_of(members: Members, known: Assignment) -> npt.NDArray[np.intp]:
    """Positions of an assignment's sets: all of one set's requests have its worker, and no other request has."""
    N = len(known)
    sizes = (members < N).sum(axis=1)
    worker = known[members[:, 0]]
    held = np.bincount(known)
    alike = (np.append(known, -1)[members] == worker[:, None]).sum(axis=1)
    return np.flatnonzero((alike == sizes) & (sizes == held[worker]))


def _prices(members: Members, costs: Floats, N: int, D: int) -> tuple[Floats, float]:
    """What each request costs, and what a worker costs (zero or less), in the linear program with these sets alone."""
    solved = linprog(
        costs,
        A_eq=_incidence(members, N).toarray(),
        b_eq=np.ones(N),
        A_ub=np.ones((1, len(costs))),
        b_ub=np.full(1, D),
        method="highs",
    )
    assert solved.status == 0, solved.message  # the known assignment is a solution
    return solved.eqlin.marginals, float(solved.ineqlin.marginals[0])


def _incidence(members: Members, N: int) -> csc_array:
    column, place = np.nonzero(members < N)
    return csc_array((np.ones(len(column)), (members[column, place], column)), shape=(N, len(members)))


def _in_whole(members: Members, costs: Floats, instance: Instance) -> tuple[Assignment | None, bool]:
    """The best choice of these sets that was found, and whether it is the best."""
    N = len(instance)
    matrix = vstack([_incidence(members, N), csc_array(np.ones((1, len(costs))))])
    solved = milp(
        costs,
        integrality=np.ones(len(costs), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, [*np.ones(N), 0], [*np.ones(N), instance.workers]),
        options={"node_limit": _NODES, "mip_rel_gap": 0.0},
    )
    if solved.x is None:
        return None, False
    assignment = np.empty(N, dtype=np.int64)
    for k, chosen in enumerate(members[solved.x > 0.5]):
        assignment[chosen[chosen < N]] = k
    return assignment, solved.status == 0
