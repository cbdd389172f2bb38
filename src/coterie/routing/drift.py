"""Whether new centroids would serve the requests of now better than the present ones: a test on held-out requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.clustering import align_centroids, balanced_assignment, balanced_kmeans, refit

SIGNIFICANT = 3.0
"""Standard errors above which a gain counts: nominally one false alarm in 740 tests."""

Rows = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Gain:
    """What a refit would gain on requests that it has not seen.

    Attributes:
        mean: of the cosine of a request to its centroid.
        error: standard error of it.
    """

    mean: float
    error: float

    @property
    def z(self) -> float:
        """The gain in standard errors; 0 where nothing differs."""
        if self.error > 0:
            return self.mean / self.error
        return math.copysign(math.inf, self.mean) if self.mean else 0.0

    @property
    def significant(self) -> bool:
        """Whether it is too large for chance."""
        return self.z > SIGNIFICANT


def held_out_gain(signatures: Rows, centroids: Rows) -> Gain:
    """Fit to one half of the requests, measure on the other, and the other way round.

        kept[i]  = cosine of signature i to the present centroid that it is assigned to
        refit[i] = the same with centroids that were refitted to the half in which i is not
        gain     = mean of refit - kept,   error = standard deviation of it / sqrt(N)

    Assignments are balanced: each centroid takes as many requests as any other, as each worker should.  So the gain
    sees both that drift can do: requests that are like no centroid, and requests that are all like the same one, whose
    surplus is pushed to distant ones.

    Nothing is asked of the distribution, and no record of the past is needed.  Without drift half a window makes worse
    centroids than the present ones, which stand for many more requests, so the gain is below zero on average, and false
    alarms are rarer than the bound says.  The bound is that of independent differences, which balance ties a little.

    The halves are drawn at random, always alike for the same number of requests; every other request would make two
    different mixes of traffic that alternates.

    Args:
        signatures: `[N, D]` unit rows, N >= 2 K.
        centroids: `[K, D]` unit rows.

    Raises:
        InputError: fewer rows, or rows that are not of length 1.
    """
    halves = np.array_split(signatures[np.random.default_rng(0).permutation(len(signatures))], 2)
    found = [fit_again(half, centroids) for half in halves]
    differences = np.concatenate(
        [
            _balanced_cosines(half, other) - _balanced_cosines(half, centroids)
            for half, other in zip(halves, reversed(found), strict=True)
        ]
    )
    return Gain(float(differences.mean()), float(differences.std(ddof=1)) / math.sqrt(len(differences)))


def fit_again(signatures: Rows, centroids: Rows) -> Rows:
    """New centroids, each in the place of the present one that it is most like.

    The more cohesive of two fits: one that begins at the present centroids, and one that begins at new seeds.  The
    second is for traffic that is like few of them: the others then begin between all requests, and may stay there.

    Args:
        signatures: `[N, D]` unit rows, N >= K.
        centroids: `[K, D]` unit rows.
    """
    moved = refit(signatures, centroids)
    anew = balanced_kmeans(signatures, len(centroids), np.random.default_rng(0), starts=1)
    if anew.cohesion <= moved.cohesion:
        return moved.centroids
    return anew.centroids[align_centroids(centroids, anew.centroids)]


def _balanced_cosines(rows: Rows, centroids: Rows) -> Rows:
    cosines = rows @ centroids.T
    capacity = -(-len(rows) // len(centroids))
    chosen: Rows = cosines[np.arange(len(rows)), balanced_assignment(cosines, capacity)]
    return chosen
