"""Who owns which centroid: one for each decode group, or shared for the moment after a group has joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.clustering import balanced_kmeans

Centroids = npt.NDArray[np.float32]
Rows = npt.NDArray[np.floating[Any]]
Sizes = npt.NDArray[np.number[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A division of the requests' signatures among decode groups.

    C and D below: centroids, dimensions of a signature.

    Attributes:
        centroids: `[C, D]` unit vectors.
        row_of: the row of each group's centroid, in the order of the groups; several groups may share one.
    """

    centroids: Centroids
    row_of: Mapping[str, int]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups."""
        return tuple(self.row_of)

    @property
    def shared(self) -> bool:
        """Whether some group has no centroid of its own."""
        return len(self.centroids) < len(self.row_of)

    def over(self, groups: Sequence[str], requests: Mapping[str, int]) -> Partition:
        """The same division, as far as it can be, among other groups; quick, and without any signature at hand.

        Who stays keeps its centroid, and those of groups that are gone go with them.  A new group shares the centroid
        that has most requests in flight for each of its groups, the first among equals: from its first request on
        it takes half of what was too much there.

        Args:
            groups: at least one, in the order of the targets.
            requests: in flight, by group.
        """
        kept = {group: self.row_of[group] for group in groups if group in self.row_of}
        if not kept:
            return deal(self.centroids, np.ones(len(self.centroids)), groups)
        rows = sorted(set(kept.values()))
        row_of = {group: rows.index(row) for group, row in kept.items()}
        load = np.zeros(len(rows))
        for group, row in row_of.items():
            load[row] += requests.get(group, 0)
        _share(row_of, load, groups)
        return Partition(self.centroids[rows], {group: row_of[group] for group in groups})

    def seeds(self, signatures: Rows) -> Rows:
        """`[G, D]` one centroid for each group to begin a fit at: its own, or a part of what it shares.

        The signatures nearest to a centroid that m groups share, `m / G` of all, are clustered into m; the part
        that is nearest to the centroid falls to the first of the groups, which so keeps most of what it had.

        Args:
            signatures: `[N, D]` unit rows, N >= G.
        """
        seeds = self.centroids[list(self.row_of.values())].astype(np.float64)
        owners = np.array(list(self.row_of.values()))
        for row in np.flatnonzero(np.bincount(owners) > 1):
            sharers = np.flatnonzero(owners == row)
            near = signatures @ self.centroids[row]
            most = -(-len(signatures) * len(sharers) // len(owners))
            nearest = np.argsort(-near, kind="stable")[:most]
            parts = balanced_kmeans(signatures[nearest], len(sharers), np.random.default_rng(0), starts=1).centroids
            seeds[sharers] = parts[np.argsort(-(parts @ self.centroids[row]), kind="stable")]
        return seeds


def deal(centroids: Centroids, sizes: Sizes, groups: Sequence[str]) -> Partition:
    """Divide centroids that belong to no one yet among groups, whatever their numbers.

    As many as there are groups: the k-th belongs to the k-th group.  Too many: the smallest is merged into the one
    that is most like it, again and again.  Too few: the groups that are left share the largest ones.

    Args:
        centroids: `[C, D]` unit vectors.
        sizes: `[C]` requests of each.
        groups: at least one, in the order of the targets.
    """
    while len(centroids) > len(groups):
        centroids, sizes = _merge_smallest(centroids, sizes)
    row_of = dict(zip(groups, range(len(centroids)), strict=False))
    _share(row_of, sizes, groups)
    return Partition(centroids, row_of)


def _share(row_of: dict[str, int], load: Sizes, groups: Sequence[str]) -> None:
    """Give each group that has no centroid a share in the one with most load for each of its groups."""
    sharers = np.bincount(list(row_of.values()), minlength=len(load))
    for group in groups:
        if group not in row_of:
            row_of[group] = int((load / sharers).argmax())
            sharers[row_of[group]] += 1


def _merge_smallest(centroids: Centroids, sizes: Sizes) -> tuple[Centroids, Sizes]:
    smallest = int(sizes.argmin())
    likeness = centroids @ centroids[smallest]
    likeness[smallest] = -np.inf
    other = int(likeness.argmax())
    merged = sizes[other] * centroids[other] + sizes[smallest] * centroids[smallest]
    length = np.linalg.norm(merged)
    centroids, sizes = centroids.copy(), sizes.astype(np.float64)
    if length > 0:  # else they are opposite, or both of no request: the other stays as it is
        centroids[other] = merged / length
    sizes[other] += sizes[smallest]
    return np.delete(centroids, smallest, axis=0), np.delete(sizes, smallest)
