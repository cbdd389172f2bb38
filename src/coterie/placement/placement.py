"""A placement of experts on ranks, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError

Ids = npt.NDArray[np.int64]
Load = npt.NDArray[np.number[Any]]
"""Load of each expert of each layer, `[L, E]`, not negative: tokens, or another measure of use."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the experts of each layer are.  A rank is an expert server, or a rank of an expert-parallel group.

        rank      0           1           2
        slot      0   1   2   3   4   5   6   7     rank_of = 0 0 0 1 1 1 2 2
        layer 0   4   0   3   1   4   2   5   4     experts[0]: expert 4 has three replicas,
                  .2  1   1   1   .3  1   1   .5    shares[0]: which take 20, 30 and 50 % of its load

    Attributes:
        experts: `[L, S]` expert that each slot holds.
        rank_of: `[S]` rank of each slot, in ascending order, from 0 to R - 1.
        shares: `[L, S]` part of its expert's load that a slot is to take; those of an expert sum to 1.

    Raises:
        InputError: a layer lacks an expert, two replicas of one are on the same rank, a rank has no slot, or shares do
            not sum to 1.
    """

    experts: Ids
    rank_of: Ids
    shares: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        shape = self.experts.shape
        if len(shape) != 2 or not self.experts.size or self.rank_of.shape != shape[1:] or self.shares.shape != shape:
            raise InputError(
                f"placement: shapes {shape}, {self.rank_of.shape} and {self.shares.shape}; need [L, S], [S] and [L, S]"
            )
        if self.rank_of[0] != 0 or not np.isin(np.diff(self.rank_of), (0, 1)).all():
            raise InputError("placement: the ranks of the slots must be 0, 1, 2 and so on, each at least once")
        if self.experts.min() < 0:
            raise InputError(f"placement: expert {self.experts.min()} is negative")
        if not (self.shares >= 0).all():
            raise InputError("placement: a share is negative or not a number")
        _refuse("lacks", self.replicas == 0)
        places = self.experts * self.ranks + self.rank_of
        held = _sums(places, np.ones(shape), self.replicas.shape[1] * self.ranks)
        _refuse("has two replicas on one rank of", (held > 1).reshape(self.layers, -1, self.ranks).any(axis=2))
        sums = _sums(self.experts, self.shares, self.replicas.shape[1])
        _refuse("has shares that do not sum to 1 of", np.abs(sums - 1) > 1e-6)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.experts)

    @property
    def ranks(self) -> int:
        """R."""
        return int(self.rank_of[-1]) + 1

    @property
    def replicas(self) -> Ids:
        """`[L, E]`: how many ranks hold each expert."""
        return _sums(self.experts, np.ones(self.experts.shape)).astype(np.int64)

    def owners(self, layer: int, expert: int) -> tuple[int, ...]:
        """Ranks that hold an expert, in ascending order."""
        return tuple(self.rank_of[self.experts[layer] == expert].tolist())

    def held(self, layer: int, rank: int) -> tuple[int, ...]:
        """Experts that a rank holds, in slot order."""
        return tuple(self.experts[layer, self.rank_of == rank].tolist())

    def rank_of_expert(self) -> Ids:
        """`[L, E]`: the one rank that holds each expert.

        Raises:
            InputError: an expert has several.
        """
        if (self.replicas != 1).any():
            raise InputError("placement: an expert has replicas, so that no one rank is its own; ask owners()")
        return self.rank_of[np.argsort(self.experts, axis=1)]

    def loads(self, load: Load) -> npt.NDArray[np.float64]:
        """`[L, R]`: expected load of each rank.

        Args:
            load: `[L, E]`; need not be the one that the placement was made for.

        Raises:
            InputError: another shape, or a load that is negative or not finite.
        """
        check_load(load, self.replicas.shape)
        of_slot = np.take_along_axis(load, self.experts, axis=1) * self.shares
        return _sums(np.broadcast_to(self.rank_of, self.experts.shape), of_slot)

    def imbalance(self, load: Load) -> npt.NDArray[np.float64]:
        """`[L]`: load of the busiest rank over that of the mean rank, so 1 is even; 1 where there is no load."""
        loads = self.loads(load)
        mean = loads.mean(axis=1)
        even: npt.NDArray[np.float64] = np.ones_like(mean)
        np.divide(loads.max(axis=1), mean, out=even, where=mean > 0)
        return even


def even_slots(total: int, ranks: int) -> tuple[int, ...]:
    """Slots of each rank, `total` in all, as even as can be; the first ranks have one more where it does not divide.

    Raises:
        InputError: fewer slots than ranks, or no rank.
    """
    if not 1 <= ranks <= total:
        raise InputError(f"placement: {total} slots for {ranks} ranks; each rank needs one at least")
    each, more = divmod(total, ranks)
    return (each + 1,) * more + (each,) * (ranks - more)


def check_load(load: Load, shape: Sequence[int] | None = None) -> None:
    """Check a load.

    Raises:
        InputError: it is not `[L, E]` (of this shape, if one is given), or a value is negative or not finite.
    """
    if load.ndim != 2 or not load.size or (shape is not None and load.shape != tuple(shape)):
        raise InputError(
            f"placement: load of shape {load.shape}; need {tuple(shape) if shape else '[L, E], not empty'}"
        )
    wrong = np.argwhere(~(np.isfinite(load) & (load >= 0)))
    if wrong.size:
        layer, expert = wrong[0]
        raise InputError(f"placement: load {load[layer, expert]} of expert {expert} in layer {layer}; need 0 or more")


def _sums(places: Ids, values: npt.NDArray[Any], length: int = 0) -> npt.NDArray[np.float64]:
    """Sum of the values `[L, S]` at each place, for each layer; at least as many places as there are."""
    length = max(length, int(places.max()) + 1)
    sums = [np.bincount(where, what, length) for where, what in zip(places, values, strict=True)]
    return np.array(sums, np.float64)


def _refuse(what: str, wrong: npt.NDArray[np.bool_] | np.bool_) -> None:
    """Raise an error that names the first `[L, E]` that is wrong."""
    if wrong.any():
        layer, expert = np.argwhere(wrong)[0]
        raise InputError(f"placement: layer {layer} {what} expert {expert}")
