"""Balanced spherical k-means: one centroid per decode group, none with more than its share of requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

_UNIT_TOLERANCE = 1e-3
_FIXED_POINT = float(1 << 40)
_FAR = 1 << 61  # longer than any path, and twice that still fits 64 bits
_FLAT = 1e-9  # rows whose mean is shorter than this have no common direction


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """A division of N unit rows into K clusters.

    Attributes:
        centroids: `[K, D]` unit vectors.
        labels: `[N]` cluster of each row.
        cohesion: mean cosine of a row to the centroid of its cluster; higher is better.
    """

    centroids: Floats
    labels: Labels
    cohesion: float


def balanced_kmeans(
    rows: npt.NDArray[np.floating[Any]],
    clusters: int,
    rng: np.random.Generator,
    *,
    starts: int = 5,
    max_rounds: int = 50,
) -> Clustering:
    """Spherical k-means in which no cluster holds more than `ceil(N / K)` rows (ELDR section 1.3).

    Two steps alternate until no row changes its cluster: assign the rows, by the optimum of
    `balanced_assignment`; move each centroid to the direction of its rows' sum.  Neither lowers the sum of
    cosines, so the rounds end.  Each start seeds its centroids by k-means++ from its own random stream, so
    adding starts leaves the earlier ones alone; the most cohesive is kept, the first among equals.

    A cluster without rows keeps its centroid, and so does one whose rows cancel out.  Identical rows are
    divided like any others, lower-numbered clusters first.

    Args:
        rows: `[N, D]` unit rows, N >= K.
        clusters: K.
        rng: source of the seeding; the same state gives the same bytes.
        starts: how many seedings to try.
        max_rounds: rounds of one start after which it is taken as it is.

    Raises:
        InputError: fewer rows than clusters, or rows that are not unit vectors.
    """
    checked = _check_rows(rows, clusters)
    if starts < 1 or max_rounds < 1:
        raise InputError(f"clustering: starts and rounds must be at least 1, got {starts} and {max_rounds}")
    found = [_lloyd(checked, _seed(checked, clusters, stream), max_rounds) for stream in rng.spawn(starts)]
    return max(found, key=lambda clustering: clustering.cohesion)


def _check_rows(rows: npt.NDArray[np.floating[Any]], clusters: int) -> Floats:
    if rows.ndim != 2 or rows.dtype.kind != "f":
        raise InputError(f"clustering: rows of shape {rows.shape} {rows.dtype} are not (N, D) floats")
    if not 1 <= clusters <= len(rows):
        raise InputError(f"clustering: {len(rows)} rows cannot make {clusters} clusters; give 1 to {len(rows)}")
    if not np.isfinite(rows).all():
        raise InputError("clustering: rows hold a value that is not finite")
    checked = rows.astype(np.float64)
    lengths = np.linalg.norm(checked, axis=1)
    wrong = np.flatnonzero(np.abs(lengths - 1) > _UNIT_TOLERANCE)
    if wrong.size:
        raise InputError(f"clustering: row {wrong[0]} has length {lengths[wrong[0]]:.4g}, not 1")
    return checked


def _seed(rows: Floats, clusters: int, rng: np.random.Generator) -> Floats:
    """k-means++: each next centroid is a row drawn in proportion to its squared distance to the nearest one."""
    chosen = [int(rng.integers(len(rows)))]
    nearest = np.full(len(rows), -np.inf)
    while len(chosen) < clusters:
        nearest = np.maximum(nearest, rows @ rows[chosen[-1]])
        squared = np.maximum(2 - 2 * nearest, 0)
        squared[chosen] = 0  # else rounding could draw a row twice
        total = squared.sum()
        weights = squared / total if total > 0 else None  # all rows are alike: any of them
        chosen.append(int(rng.choice(len(rows), p=weights)))
    return rows[chosen]


def _lloyd(rows: Floats, centroids: Floats, max_rounds: int) -> Clustering:
    capacity = -(-len(rows) // len(centroids))
    labels = np.full(len(rows), -1)
    for _ in range(max_rounds):
        previous, labels = labels, balanced_assignment(rows @ centroids.T, capacity)
        if np.array_equal(previous, labels):
            break
        centroids = _move(rows, labels, centroids)
    cohesion = float(np.einsum("nd,nd->", rows, centroids[labels])) / len(rows)
    return Clustering(centroids, labels, cohesion)


def _move(rows: Floats, labels: Labels, centroids: Floats) -> Floats:
    moved = centroids.copy()
    for k in range(len(centroids)):
        total = rows[labels == k].sum(axis=0)
        if (length := np.linalg.norm(total)) > _FLAT:
            moved[k] = total / length
    return moved


# --- the assignment -----------------------------------------------------------------------------------


def balanced_assignment(similarity: Floats, capacity: int) -> Labels:
    """Assign each row to a cluster, at most `capacity` to each, with the largest possible sum of similarities.

    This is the transportation problem, solved by successive shortest augmenting paths over the K clusters:

    1. Put every row into its most similar cluster.  Some are too full.
    2. Moving row n from cluster a to b costs similarity[n, a] - similarity[n, b]; the edge a -> b has the
       cost of the cheapest row of a.
    3. Along the cheapest path from a cluster that is too full to one with room, move one row per edge.
       Repeat until none is too full.

    Step 1 leaves no cheaper cycle of moves, and a move along a *cheapest* path creates none, so the result is
    the optimum.  Similarities are rounded to multiples of 2^-40 and added as integers: with exact sums there
    is no false negative cycle, and ties resolve alike on every machine (the lower number wins).

    The number of paths is the surplus of step 1, usually a fraction of N, and each is found on K nodes.
    `scipy.optimize.linear_sum_assignment` on N x (K * capacity) finds the same optimum, but treats the copies
    of a cluster as strangers: 0.1 s against 0.02 to 0.06 s for 1000 rows and 16 clusters, growing as N^3.

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
    if not (np.abs(similarity) <= 1000).all():  # also catches NaN
        raise InputError("clustering: similarities must be finite and of magnitude up to 1000")
    cost = np.rint(similarity * -_FIXED_POINT).astype(np.int64)
    labels: Labels = cost.argmin(axis=1)
    _spread_surplus(cost, labels, capacity)
    return labels


def _spread_surplus(cost: npt.NDArray[np.int64], labels: Labels, capacity: int) -> None:
    """Steps 2 and 3, on `labels` in place."""
    clusters = cost.shape[1]
    sizes = np.bincount(labels, minlength=clusters)
    edges = np.full((clusters, clusters), _FAR)  # edges[a, b]: cost of the cheapest move from a to b
    movers = np.zeros((clusters, clusters), dtype=np.int64)  # the row that makes it
    for a in range(clusters):
        _price_moves(a, cost, labels, edges, movers)
    for _ in range(int(np.maximum(sizes - capacity, 0).sum())):
        path = _cheapest_path(edges, sizes > capacity, sizes < capacity)
        labels[[movers[a, b] for a, b in pairwise(path)]] = path[1:]
        sizes[path[0]] -= 1
        sizes[path[-1]] += 1
        for a in path:
            _price_moves(a, cost, labels, edges, movers)


def _price_moves(
    a: int, cost: npt.NDArray[np.int64], labels: Labels, edges: npt.NDArray[np.int64], movers: Labels
) -> None:
    members = np.flatnonzero(labels == a)
    if not members.size:
        edges[a] = _FAR
        return
    prices = cost[members] - cost[members, a, None]  # (members, K)
    cheapest = prices.argmin(axis=0)
    edges[a] = prices[cheapest, np.arange(len(cheapest))]
    edges[a, a] = _FAR
    movers[a] = members[cheapest]


def _cheapest_path(
    edges: npt.NDArray[np.int64], sources: npt.NDArray[np.bool_], sinks: npt.NDArray[np.bool_]
) -> list[int]:
    """Bellman-Ford from all sources to the nearest sink; edges may be negative, cycles are not.

    A source has rows and each may move anywhere, so the first round reaches every cluster.
    """
    nodes = np.arange(len(edges))
    distance = np.where(sources, 0, _FAR)
    parent = np.full(len(edges), -1)
    while True:
        reached = distance[:, None] + edges
        via = reached.argmin(axis=0)
        shorter = reached[via, nodes] < distance
        if not shorter.any():
            break
        distance[shorter] = reached[via, nodes][shorter]
        parent[shorter] = via[shorter]
    path = [int(np.where(sinks, distance, _FAR).argmin())]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return path[::-1]


def align_centroids(current: npt.NDArray[np.floating[Any]], new: npt.NDArray[np.floating[Any]]) -> Labels:
    """Match new centroids to the current ones, so that a refit changes as few owners as it can.

    Args:
        current: `[K, D]` unit rows; row k belongs to decode group k.
        new: `[K, D]` unit rows in any order.

    Returns:
        `[K]` order such that `new[order[k]]` takes the place of `current[k]`, with the largest possible sum of
        cosines.

    Raises:
        InputError: the shapes differ.
    """
    from scipy.optimize import linear_sum_assignment  # takes a quarter second to import, and routing never needs it

    if current.ndim != 2 or current.shape != new.shape:
        raise InputError(f"clustering: centroids of shape {new.shape} cannot take the place of {current.shape}")
    return np.asarray(linear_sum_assignment(current @ new.T, maximize=True)[1], dtype=np.int64)
