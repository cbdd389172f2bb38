"""Experts of a simulated group on its ranks, and what the busiest rank of each layer has to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.placement import Placement, balance_without_replicas, even_slots


class BusiestRank:
    """Adds up what the ranks of a group have to do; ranks wait for one another at every layer.

    Args:
        placement: without replicas.

    Raises:
        InputError: an expert has several.
    """

    def __init__(self, placement: Placement) -> None:
        layers = placement.layers
        self._shape = layers, placement.ranks
        self._places = (placement.rank_of_expert() + placement.ranks * np.arange(layers)[:, None]).ravel()

    def __call__(self, used: npt.NDArray[np.floating[Any]]) -> float:
        """Sum over layers of the most that a rank has.

        Args:
            used: `[L, E]` chance that an expert is active.
        """
        layers, ranks = self._shape
        loads = np.bincount(self._places, weights=used.ravel(), minlength=layers * ranks)
        return float(loads.reshape(layers, ranks).max(axis=1).sum())


def contiguous(geometry: ModelGeometry, ranks: int) -> Placement:
    """The first experts of each layer on rank 0, and so on: what engines do by default.

    Raises:
        InputError: there are more ranks than experts.
    """
    rank_of = np.repeat(np.arange(ranks), even_slots(geometry.experts, ranks))
    experts = np.tile(np.arange(geometry.experts), (geometry.layers, 1))
    return Placement(experts, rank_of, np.ones(experts.shape))


def placements_of(profile: Profile, trace: ActivationTrace, ranks: int, *, batch: int = 64) -> tuple[Placement, ...]:
    """A placement for each decode group, balanced for the requests that locality sends it.

        use[k, l, e] = 1 - (1 - p[k, l, e])^batch

    where p is the share of the output tokens that chose the expert, mean over the trace's requests that are nearest to
    centroid k: how likely it is that a batch of them activates it.  Chances of being active are balanced, and not
    tokens, since a rank reads an expert's weights once for however many tokens (METRO; ELDR section on expert
    placement).  A cluster without such requests gets the mean of all.

    Args:
        profile: one centroid per decode group.
        trace: requests with outputs, such as those that the profile was fitted to.
        ranks: of each group.
        batch: requests of the group that decode together; from 8 to 128 they gave like placements.

    Raises:
        InputError: the trace is of another geometry, a request has no counted output token, or there are more ranks
            than experts.
    """
    if trace.geometry != profile.geometry:
        raise InputError(f"placement: the trace is of {trace.geometry}, the profile of {profile.geometry}")
    if (trace.decode_covered < 1).any():
        raise InputError("placement: a request has no counted output token; collect it with --max-tokens 2 or more")
    share = trace.decode / trace.decode_covered[:, None, None]
    nearest = (profile.transform.apply(trace.prefill) @ profile.centroids.T).argmax(axis=1)
    members = [share[nearest == k] if (nearest == k).any() else share for k in range(profile.clusters)]
    return tuple(balance_without_replicas(1 - (1 - some.mean(axis=0)) ** batch, ranks) for some in members)
