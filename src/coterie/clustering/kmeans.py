"""Spherical k-means, with and without bounded clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.clustering.assignment import EqualShares, Labels, Similarities
from coterie.clustering.exact import Floats, UnitRows, Vectors, directions
from coterie.errors import InputError

_Divide = Callable[[Similarities], Labels]


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
    rows: Vectors, clusters: int, rng: np.random.Generator, *, starts: int = 5, max_rounds: int = 50
) -> Clustering:
    """Spherical k-means in which no cluster holds more than `ceil(N / K)` rows (ELDR section 1.3).

    Two steps alternate until no row changes its cluster: assign the rows, by the optimum of
    `balanced_assignment`; move each centroid to the direction of its rows' sum.  Neither lowers the sum of
    cosines, so the rounds end.  Each start seeds its centroids by k-means++ from its own random stream, so
    adding starts leaves the earlier ones alone; the most cohesive is kept, the first among equals.

    All sums of rows are exact (`exact.UnitRows`), so the result does not depend on the number of threads.
    Memory beside the rows is at most 100 MiB and `16 * starts * K * (N + D)` bytes.

    What happens at the edges:

    - A cluster without rows keeps its centroid, and so does one whose rows cancel out.
    - Identical rows are divided like any others; their clusters share one centroid.
    - N = K gives each row its own cluster; K = 1 gives one cluster, whatever the seed.
    - Where N is not a multiple of K, clusters may hold fewer than `ceil(N / K)` rows, down to none.
    - Zero rows have no direction and are refused, and so is N < K.

    Args:
        rows: `[N, D]` unit rows, float32 or float64, N >= K.
        clusters: K.
        rng: source of the seeding; the same state gives the same bytes.
        starts: how many seedings to try.
        max_rounds: rounds of one start after which it is taken as it is.

    Raises:
        InputError: fewer rows than clusters, or rows that are not unit vectors.
    """
    return _best(rows, clusters, rng, starts, max_rounds, lambda: EqualShares(clusters))


def kmeans(
    rows: Vectors, clusters: int, rng: np.random.Generator, *, starts: int = 5, max_rounds: int = 50
) -> Clustering:
    """`balanced_kmeans` without the bound: every row goes to its nearest centroid, the first among equals.

    For comparison (ELDR's "vanilla" ablation): from the same generator it starts from the same seeds.

    Args:
        rows: as for `balanced_kmeans`, and so are all others.
        clusters: K.
        rng: source of the seeding.
        starts: how many seedings to try.
        max_rounds: rounds of one start.

    Raises:
        InputError: as for `balanced_kmeans`.
    """
    return _best(rows, clusters, rng, starts, max_rounds, lambda: _nearest)


def refit(rows: Vectors, centroids: Vectors, *, max_rounds: int = 50) -> Clustering:
    """Balanced k-means of new rows that begins at known centroids, for a workload that drifts.

    No chance is involved.  The result is aligned: its cluster k takes the place of `centroids[k]`, such that the
    sum of cosines between the two is as large as it can be, so that as few owners as possible change.  To carry
    clusters over to another model, begin at `centroids_of` the new model's rows.

    Args:
        rows: `[N, D]` unit rows, N >= K.
        centroids: `[K, D]` unit rows; row k belongs to decode group k.
        max_rounds: rounds after which the clustering is taken as it is.

    Raises:
        InputError: fewer rows than clusters, vectors that are not of length 1, or of different dimensions.
    """
    points, begin = UnitRows("row", rows), UnitRows("centroid", centroids)
    _check_numbers(points, len(begin), 1, max_rounds)
    if points.dimensions != begin.dimensions:
        raise InputError(
            f"clustering: rows of {points.dimensions} dimensions cannot move centroids of {begin.dimensions}"
        )
    run = _Run(begin.take(np.arange(len(begin))), len(points), EqualShares(len(begin)))
    _alternate(points, [run], max_rounds)
    order = align_centroids(centroids, run.centroids)
    return Clustering(run.centroids[order], np.argsort(order)[run.labels], run.cohesion)


def centroids_of(rows: Vectors, labels: Labels, clusters: int) -> Floats:
    """Directions of the sums of given groups of rows.

    Args:
        rows: `[N, D]` unit rows.
        labels: `[N]` group of each row, from 0 to K - 1.
        clusters: K.

    Returns:
        `[K, D]` unit rows.

    Raises:
        InputError: a group has no rows, or they cancel out; a label is out of range; rows are not unit vectors.
    """
    points = UnitRows("row", rows)
    if labels.shape != (len(points),) or not ((labels >= 0) & (labels < clusters)).all():
        raise InputError(f"clustering: labels must be {len(points)} whole numbers from 0 to {clusters - 1}")
    sums = points.sums(_one_hot(labels, clusters), np.arange(len(points)))
    found, exist = directions(sums, np.bincount(labels, minlength=clusters))
    if not exist.all():
        raise InputError(f"clustering: the rows of cluster {np.flatnonzero(~exist)[0]} are none or cancel out")
    return found


def align_centroids(current: Vectors, new: Vectors) -> Labels:
    """Match new centroids to the current ones, so that a refit changes as few owners as it can.

    Args:
        current: `[K, D]` unit rows; row k belongs to decode group k.
        new: `[K, D]` unit rows in any order.

    Returns:
        `[K]` order such that `new[order[k]]` takes the place of `current[k]`, with the largest possible sum of
        cosines.

    Raises:
        InputError: the shapes differ, or a row is not of length 1.
    """
    from scipy.optimize import linear_sum_assignment  # takes a quarter second to import, and routing never needs it

    if current.shape != new.shape:
        raise InputError(f"clustering: centroids of shape {new.shape} cannot take the place of {current.shape}")
    cosines = UnitRows("centroid", current).cosines(UnitRows("centroid", new).take(np.arange(len(new))))
    return np.asarray(linear_sum_assignment(cosines, maximize=True)[1], dtype=np.int64)


# --- the rounds ---------------------------------------------------------------------------------------


class _Run:
    """One start: centroids, and the labels that they led to.

    Attributes:
        centroids: `[K, D]` unit vectors.
        labels: `[N]`; -1 before the first round.
        moved: clusters whose centroid is not the one that the similarities were computed with.
    """

    def __init__(self, centroids: Floats, rows: int, divide: _Divide) -> None:
        self.centroids = centroids
        self.labels: Labels = np.full(rows, -1)
        self.moved: Labels = np.arange(len(centroids))
        self._divide = divide
        self._similarity = np.empty((rows, len(centroids)))
        self._sums = np.zeros_like(centroids)

    def advance(self, rows: UnitRows, cosines: Floats) -> None:
        """One round, given the cosines `[N, moved]` of the rows to the centroids that moved."""
        self._similarity[:, self.moved] = cosines
        before, self.labels = self.labels, self._divide(self._similarity)
        changed = np.flatnonzero(before != self.labels)
        came, left = self.labels[changed], before[changed]
        self.moved = np.setdiff1d(np.concatenate([came, left]), [-1])
        clusters = len(self.centroids)
        self._sums += rows.sums(_one_hot(came, clusters) - _one_hot(left, clusters), changed)
        found, exist = directions(self._sums, np.bincount(self.labels, minlength=clusters))
        self.centroids = np.where(exist[:, None], found, self.centroids)

    @property
    def cohesion(self) -> float:
        """Mean cosine; that of all rows of a cluster is that of their sum.

        Summed exactly, so that starts that found the same clusters, in whatever order, are equal to the last bit.
        """
        return math.fsum((self._sums * self.centroids).ravel().tolist()) / len(self.labels)


def _best(
    rows: Vectors,
    clusters: int,
    rng: np.random.Generator,
    starts: int,
    max_rounds: int,
    divide: Callable[[], _Divide],
) -> Clustering:
    points = UnitRows("row", rows)
    _check_numbers(points, clusters, starts, max_rounds)
    runs = [_Run(seeds, len(points), divide()) for seeds in _seed(points, clusters, rng.spawn(starts))]
    _alternate(points, runs, max_rounds)
    best = max(runs, key=lambda run: run.cohesion)
    return Clustering(best.centroids, best.labels, best.cohesion)


def _check_numbers(rows: UnitRows, clusters: int, starts: int, max_rounds: int) -> None:
    if not 1 <= clusters <= len(rows):
        raise InputError(f"clustering: {len(rows)} rows cannot make {clusters} clusters; give 1 to {len(rows)}")
    if starts < 1 or max_rounds < 1:
        raise InputError(f"clustering: starts and rounds must be at least 1, got {starts} and {max_rounds}")


def _seed(rows: UnitRows, clusters: int, streams: Sequence[np.random.Generator]) -> list[Floats]:
    """k-means++ for each stream, side by side: every pass over the rows serves all of them."""
    chosen = [[int(stream.integers(len(rows)))] for stream in streams]
    nearest = np.full((len(streams), len(rows)), -np.inf)  # cosine of each row to the nearest chosen one
    for _ in range(1, clusters):
        latest = rows.take(np.array([row[-1] for row in chosen]))
        nearest = np.maximum(nearest, rows.cosines(latest).T)
        for stream, row, near in zip(streams, chosen, nearest, strict=True):
            row.append(_draw(stream, near))
    return [rows.take(np.array(row)) for row in chosen]


def _draw(rng: np.random.Generator, nearest: Floats) -> int:
    """A row in proportion to its squared distance to the nearest chosen one."""
    squared = np.maximum(2 - 2 * nearest, 0)
    total = squared.sum()
    weights = squared / total if total > 0 else None  # all rows are alike: any of them
    return int(rng.choice(len(nearest), p=weights))


def _alternate(rows: UnitRows, runs: Sequence[_Run], max_rounds: int) -> None:
    """Lloyd's rounds of all runs, side by side; a run that is at rest drops out."""
    for _ in range(max_rounds):
        if not (active := [run for run in runs if run.moved.size]):
            return
        cosines = rows.cosines(np.concatenate([run.centroids[run.moved] for run in active]))
        ends = np.cumsum([run.moved.size for run in active])[:-1]
        for run, part in zip(active, np.split(cosines, ends, axis=1), strict=True):
            run.advance(rows, part)


def _nearest(similarity: Similarities) -> Labels:
    labels: Labels = similarity.argmax(axis=1)
    return labels


def _one_hot(labels: Labels, clusters: int) -> npt.NDArray[np.int8]:
    """`[n, K]`: 1 where the label is; nowhere for -1."""
    return np.equal(labels[:, None], np.arange(clusters)).astype(np.int8)
