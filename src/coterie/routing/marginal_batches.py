"""Expected active experts of the batches in flight, kept up to date request by request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.core import ExpertCounts, ModelGeometry

MOST = 1 - 1e-6
"""Greatest probability that one request may give an expert; products of complements stay above zero."""

_UNIT = 2.0**-20
_REMEMBERED = 1000

Usage = npt.NDArray[np.float32]
"""How likely one token of a request is to choose each expert, `[L * E]`."""

Row = npt.NDArray[np.int64]
"""Logarithms of a request's idle probabilities, `[L * E]`, in multiples of 2^-20."""


class MeanUsage:
    """Running mean over requests of what their prompts used: the first 1000 count alike, then the older ones fade."""

    def __init__(self) -> None:
        self.value: Usage | None = None
        self._requests = 0

    def add(self, usage: Usage) -> None:
        """Count one more request."""
        self._requests = min(self._requests + 1, _REMEMBERED)
        if self.value is None:
            self.value = usage.copy()
        else:
            np.add(self.value, (usage - self.value) / np.float32(self._requests), out=self.value)


def usage_of(counts: ExpertCounts) -> Usage:
    """Shares of the counted tokens that chose each expert; at least one was counted."""
    usage: Usage = counts.counts.ravel() / np.float32(counts.covered)
    return np.minimum(usage, np.float32(MOST), out=usage)


def row_of(usage: Usage) -> Row:
    """What a request brings to its batch."""
    return np.rint(np.log1p(-usage) * np.float32(1 / _UNIT)).astype(np.int64)


class LiveBatches:
    """One batch for each decode group.

        idle[g, e] = product over the group's requests i of (1 - usage[i, e])
        active[g]  = sum over e of (1 - idle[g, e])

    with e over the (layer, expert) pairs: each request uses an expert with a probability of its own, independently of
    the others.  The product is kept as a sum of logarithms in whole multiples of 2^-20.  Whole numbers add without
    rounding, so a request that leaves takes away exactly what it brought: nothing drifts, however long it runs, and
    the result does not depend on who came first.

    Args:
        groups: names of the groups.
        geometry: of the model.

    Attributes:
        geometry: of the model.
        idle: `[G, L * E]`, float32.
        active: `[G]`, expected (layer, expert) pairs that a step activates.
        requests: `[G]`, requests in each batch.
    """

    def __init__(self, groups: Sequence[str], geometry: ModelGeometry) -> None:
        self.geometry = geometry
        pairs = geometry.layers * geometry.experts
        self.idle = np.ones((len(groups), pairs), dtype=np.float32)
        self.active = np.zeros(len(groups))
        self.requests = np.zeros(len(groups), dtype=np.int64)
        self._position = {group: g for g, group in enumerate(groups)}
        self._logarithms = np.zeros((len(groups), pairs), dtype=np.int64)

    def join(self, group: str, row: Row) -> None:
        """A request begins.

        Args:
            group: where.
            row: its `row_of`.
        """
        self._change(self._position[group], row, +1)

    def leave(self, group: str, row: Row) -> None:
        """One that joined is over."""
        self._change(self._position[group], row, -1)

    def places(self, groups: Sequence[str]) -> list[int]:
        """Positions of groups in `idle`, `active` and `requests`."""
        return [self._position[group] for group in groups]

    def added(self, usage: Usage) -> npt.NDArray[np.float64]:
        """Active experts that one more request would add to each batch, `[G]`."""
        # einsum and not @: equal batches must give equal figures wherever they stand, and BLAS rounds by position
        added: npt.NDArray[np.float64] = np.einsum("ge,e->g", self.idle, usage).astype(np.float64)
        return added

    def _change(self, g: int, row: Row, sign: int) -> None:
        sums = self._logarithms[g]
        (np.add if sign > 0 else np.subtract)(sums, row, out=sums)
        np.multiply(sums, _UNIT, out=self.idle[g], casting="unsafe")
        np.exp(self.idle[g], out=self.idle[g])
        self.active[g] = len(sums) - float(self.idle[g].sum(dtype=np.float64))
        self.requests[g] += sign
