"""The exact assignment of rows to clusters of bounded size."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError

Labels = npt.NDArray[np.int64]
Similarities = npt.NDArray[np.floating[Any]]
_Costs = npt.NDArray[np.int64]

_FIXED_POINT = float(1 << 40)
_MOST = 1000  # largest similarity
_WORTHWHILE = 0.9  # a round of bids that leaves more than this share of the surplus is the last
_FAR = 1 << 61  # longer than any path, and twice that still fits 64 bits


def balanced_assignment(similarity: Similarities, capacity: int) -> Labels:
    """Assign each row to a cluster, at most `capacity` to each, with the largest possible sum of similarities.

    The transportation problem, in three steps:

    1. *Fill up.*  Rows without preference are added until the clusters are full to the last place.
    2. *Bid.*  Each cluster has a price, and a row goes where its cost (minus similarity) plus the price is least.
       Those that are too full raise their prices just so far that the surplus leaves, all at once, as long as
       that helps.  A few rounds take most of the surplus, in time linear in N * K.
    3. *Repair.*  Moving row n from cluster a to b costs cost[n, b] - cost[n, a]; the edge a -> b has the cost of the
       cheapest row of a.  Along the cheapest path from a cluster that is too full to one with room, move one row
       per edge, until none is too full (successive shortest paths, on K nodes).

    Why the result is the optimum, whatever the prices are: they add sum_k price[k] * size[k] to the total, which
    depends on the sizes alone, so what step 2 leaves is best among all assignments with *its* sizes: no cycle of
    moves lowers the cost.  A move along a cheapest path creates no such cycle.  At the end all sizes are `capacity`,
    as those of every assignment of the filled-up rows are.

    Similarities are rounded to multiples of 2^-40 and added as integers: with exact sums there is no false
    negative cycle, and ties resolve alike on every machine.

    `scipy.optimize.linear_sum_assignment` on N x (K * capacity) finds the same optimum, but treats the copies of
    a cluster as strangers; `bench/fitting.py` times one beside the other.

    Args:
        similarity: `[N, K]`, finite, of magnitude up to 1000 (cosines are up to 1).
        capacity: rows a cluster may hold; `K * capacity >= N`.

    Returns:
        `[N]` cluster of each row.

    Raises:
        InputError: the clusters cannot hold the rows, or a similarity is not finite or too large.
    """
    rows, clusters = similarity.shape
    if rows > clusters * capacity:
        raise InputError(f"clustering: {clusters} clusters of at most {capacity} cannot hold {rows} rows")
    if not (np.abs(similarity) <= _MOST).all():  # also catches NaN
        raise InputError(f"clustering: similarities must be finite and of magnitude up to {_MOST}")
    return _solve(similarity, min(capacity, rows), np.zeros(clusters, dtype=np.int64))[0]


class EqualShares:
    """`balanced_assignment` to clusters of `ceil(N / K)`, again and again, while the similarities change a little.

    Each solution starts from the prices of the last, where few clusters are too full.  It is an optimum all the
    same, but where several are equally good it may be another one than `balanced_assignment` finds.
    """

    def __init__(self, clusters: int) -> None:
        self._prices = np.zeros(clusters, dtype=np.int64)

    def __call__(self, similarity: Similarities) -> Labels:
        """Assign rows.

        Args:
            similarity: `[N, K]` cosines.

        Returns:
            `[N]` cluster of each row.
        """
        rows, clusters = similarity.shape
        labels, self._prices = _solve(similarity, -(-rows // clusters), self._prices)
        return labels


def _solve(similarity: Similarities, capacity: int, prices: _Costs) -> tuple[Labels, _Costs]:
    """Labels of the rows, and prices at which each is in a cluster of least cost plus price."""
    rows, clusters = similarity.shape
    cost = np.zeros((clusters * capacity, clusters), dtype=np.int64)
    cost[:rows] = np.rint(similarity.astype(np.float64) * -_FIXED_POINT)
    assignment = _Assignment(cost, _bid(cost, capacity, prices))
    assignment.spread(capacity)
    return assignment.labels[:rows], assignment.prices()


def _bid(cost: _Costs, capacity: int, prices: _Costs) -> Labels:
    """Labels that are best for their sizes, few above capacity."""
    prices, surplus_before = prices.copy(), len(cost) + 1
    while True:
        total = cost + prices
        labels: Labels = total.argmin(axis=1)
        surplus = np.maximum(np.bincount(labels, minlength=len(prices)) - capacity, 0)
        if surplus.sum() > _WORTHWHILE * surplus_before or not surplus.any():
            return labels
        surplus_before = surplus.sum()
        for a in np.flatnonzero(surplus):
            best_two = np.partition(total[labels == a], 1, axis=1)[:, :2]
            gaps = best_two[:, 1] - best_two[:, 0]  # what it takes to make each row leave
            prices[a] += np.partition(gaps, surplus[a] - 1)[surplus[a] - 1] + 1


class _Assignment:
    """Labels without a cheaper cycle of moves, and the cheapest move between any two clusters.

    Attributes:
        labels: `[N]`, changed in place.
    """

    def __init__(self, cost: _Costs, labels: Labels) -> None:
        self.labels = labels
        self._cost = np.ascontiguousarray(cost.T)  # (K, N): a move needs the costs of many rows in two clusters
        self._clusters = np.arange(len(self._cost))
        self._sizes = np.bincount(labels, minlength=len(self._cost))
        self._edges = np.full((len(self._cost),) * 2, _FAR)  # [b, a]: cost of the cheapest move from a to b
        self._movers = np.full_like(self._edges, -1)  # the row that makes it
        for a in range(len(self._cost)):
            self._price(a, np.delete(self._clusters, a))

    def spread(self, capacity: int) -> None:
        """Bring every cluster to at most `capacity` rows."""
        for _ in range(int(np.maximum(self._sizes - capacity, 0).sum())):
            path = self._cheapest_path(self._sizes > capacity, self._sizes < capacity)
            for row, a, b in [(int(self._movers[b, a]), a, b) for a, b in pairwise(path)]:
                self._move(row, a, b)
            self._sizes[path[0]] -= 1
            self._sizes[path[-1]] += 1

    def prices(self) -> _Costs:
        """`[K]` such that every row's cluster is one where its cost plus the price is least.

        That is price[a] - price[b] <= edges[b, a] for all a and b: distances, from anywhere, along edges turned round.
        """
        prices = np.zeros(len(self._clusters), dtype=np.int64)
        while (too_high := prices > (lower := (self._edges + prices[:, None]).min(axis=0))).any():
            prices = np.where(too_high, lower, prices)
        return prices

    def _move(self, row: int, a: int, b: int) -> None:
        self.labels[row] = b
        self._price(a, np.flatnonzero(self._movers[:, a] == row))
        self._offer(row, b)

    def _price(self, a: int, targets: Labels) -> None:
        """Find the cheapest moves from cluster a to some others."""
        members = np.flatnonzero(self.labels == a)
        if not members.size:
            return
        prices = self._cost[targets[:, None], members] - self._cost[a, members]  # (targets, members)
        cheapest = prices.argmin(axis=1)
        self._edges[targets, a] = prices[self._clusters[: len(targets)], cheapest]
        self._movers[targets, a] = members[cheapest]

    def _offer(self, row: int, b: int) -> None:
        """Let a row that is new in cluster b make the moves that it makes cheaper."""
        prices = self._cost[:, row] - self._cost[b, row]
        prices[b] = _FAR
        cheaper = prices < self._edges[:, b]
        self._edges[cheaper, b] = prices[cheaper]
        self._movers[cheaper, b] = row

    def _cheapest_path(self, sources: npt.NDArray[np.bool_], sinks: npt.NDArray[np.bool_]) -> list[int]:
        """Bellman-Ford from all sources to the nearest sink; edges may be negative, cycles are not.

        A source has rows and each may move anywhere, so the first round reaches every cluster.
        """
        distance = np.where(sources, 0, _FAR)
        parent = np.full(len(distance), -1)
        while True:
            reached = distance + self._edges  # (to, from)
            via = reached.argmin(axis=1)
            nearest = reached[self._clusters, via]
            shorter = nearest < distance
            if not shorter.any():
                break
            distance = np.where(shorter, nearest, distance)
            parent = np.where(shorter, via, parent)
        path = [int(np.where(sinks, distance, _FAR).argmin())]
        while parent[path[-1]] >= 0:
            path.append(int(parent[path[-1]]))
        return path[::-1]
