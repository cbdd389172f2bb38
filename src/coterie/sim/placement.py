"""Which rank of an expert-parallel group holds which expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.core import ModelGeometry
from coterie.errors import InputError

Use = npt.NDArray[np.floating[Any]]
"""How likely each expert is to be active in a step, or another measure of how much it is used, `[L, E]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Each expert is held by one rank.

    Attributes:
        rank_of: `[L, E]` rank of each expert, whole numbers.
        ranks: number R of ranks.

    Raises:
        InputError: a rank is not from 0 to R - 1.
    """

    rank_of: npt.NDArray[np.int64]
    ranks: int

    def __post_init__(self) -> None:
        least, most = self.rank_of.min(initial=0), self.rank_of.max(initial=0)
        if self.rank_of.ndim != 2 or least < 0 or most >= self.ranks:
            raise InputError(
                f"placement: ranks {least} to {most} of shape {self.rank_of.shape}; need [L, E], 0 to {self.ranks - 1}"
            )

    def loads(self, use: Use) -> npt.NDArray[np.float64]:
        """`[L, R]`: sum of the use of the experts that each rank holds of each layer."""
        layers = len(self.rank_of)
        places = self.rank_of + self.ranks * np.arange(layers)[:, None]
        sums = np.bincount(places.ravel(), weights=use.ravel(), minlength=layers * self.ranks)
        return sums.reshape(layers, self.ranks).astype(np.float64)

    def busiest(self, use: Use) -> float:
        """Sum over layers of the largest load of a rank: ranks wait for one another at every layer."""
        return float(self.loads(use).max(axis=1).sum())


def contiguous(geometry: ModelGeometry, ranks: int) -> Placement:
    """The first E / R experts of each layer on rank 0, and so on: what engines do by default.

    Raises:
        InputError: there are more ranks than experts.
    """
    _check_ranks(ranks, geometry.experts)
    rank_of = np.arange(geometry.experts) * ranks // geometry.experts
    return Placement(np.tile(rank_of, (geometry.layers, 1)), ranks)


def balanced(use: Use, ranks: int) -> Placement:
    """Spread what is used evenly: in each layer, the most used first, each to the least loaded rank that has room.

    Each rank holds E / R experts of a layer (rounded up), so this is a permutation of them: no expert is held twice.
    Greedy in order of falling size, "longest processing time": Graham 1969, "Bounds on multiprocessing timing
    anomalies", whose bound of 4/3 of the best is for ranks without a limit of experts.

    Args:
        use: `[L, E]`, not negative; chances of being active rather than tokens, since a rank reads an expert's weights
            once for however many tokens (METRO; ELDR section on expert placement).
        ranks: number of ranks.

    Raises:
        InputError: there are more ranks than experts, or a use is negative or not finite.
    """
    _check_ranks(ranks, use.shape[1])
    if not (np.isfinite(use).all() and (use >= 0).all()):
        raise InputError("placement: the use of an expert is negative or not finite")
    return Placement(np.stack([_spread(layer, ranks) for layer in use]), ranks)


def _spread(use: npt.NDArray[np.floating[Any]], ranks: int) -> npt.NDArray[np.int64]:
    room = np.full(ranks, -(-len(use) // ranks))
    loads = np.zeros(ranks)
    rank_of = np.empty(len(use), dtype=np.int64)
    for expert in np.argsort(-use, kind="stable"):
        rank = int(np.where(room > 0, loads, np.inf).argmin())
        rank_of[expert] = rank
        loads[rank] += use[expert]
        room[rank] -= 1
    return rank_of


def placements_of(profile: Profile, trace: ActivationTrace, ranks: int, *, batch: int = 64) -> tuple[Placement, ...]:
    """A placement for each decode group, balanced for the requests that locality sends it.

        use[k, l, e] = 1 - (1 - p[k, l, e])^batch

    where p is the share of the output tokens that chose the expert, mean over the trace's requests that are nearest to
    centroid k: how likely it is that a batch of them activates it.  A cluster without such requests gets the mean of
    all.

    Args:
        profile: one centroid per decode group.
        trace: requests with outputs, such as those that the profile was fitted to.
        ranks: of each group.
        batch: requests of the group that decode together; from 8 to 128 they gave like placements.

    Raises:
        InputError: the trace is of another geometry, or a request has no counted output token.
    """
    if trace.geometry != profile.geometry:
        raise InputError(f"placement: the trace is of {trace.geometry}, the profile of {profile.geometry}")
    if (trace.decode_covered < 1).any():
        raise InputError("placement: a request has no counted output token; collect it with --max-tokens 2 or more")
    share = trace.decode / trace.decode_covered[:, None, None]
    nearest = (profile.transform.apply(trace.prefill) @ profile.centroids.T).argmax(axis=1)
    members = [share[nearest == k] if (nearest == k).any() else share for k in range(profile.clusters)]
    return tuple(balanced(1 - (1 - some.mean(axis=0)) ** batch, ranks) for some in members)


def _check_ranks(ranks: int, experts: int) -> None:
    if not 1 <= ranks <= experts:
        raise InputError(f"placement: {ranks} ranks for {experts} experts")
