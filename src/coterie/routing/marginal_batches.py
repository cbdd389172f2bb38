"""Expected active experts of the batches in flight, kept up to date request by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coterie.core import ExpertCounts, ModelGeometry
from coterie.counting import KERNEL, Row, Sums

MOST = 1 - 1e-6
"""Greatest probability that one request may give an expert; products of complements stay above zero."""

_REMEMBERED = 1000
_REMEMBERED_HERE = 100
_LIKE_BEFORE = 2
_STALE = 1 / 16

Usage = npt.NDArray[np.float32]
"""How likely one token of a request is to choose each expert, `[L * E]`."""


class OtherBatches(Protocol):
    """What the requests of other gateways bring to the same groups; groups are meant by their positions."""

    def show(self, group: int, row: Row, sign: int) -> None:
        """A request of this gateway joined (+1) or left (-1)."""
        ...

    def changed(self) -> Iterable[tuple[int, int, Sums]]:
        """Groups where the others' requests or sums are not those of the last call: by how much either has grown."""
        ...


class MeanUsage:
    """Running mean over requests of what they use: the first ones count alike, then the older ones fade.

    Args:
        pairs: L * E.
        requests: how many count alike.

    Attributes:
        value: the mean, which changes; all zero before the first request.
    """

    def __init__(self, pairs: int, requests: int = _REMEMBERED) -> None:
        self.value: Usage = np.zeros(pairs, dtype=np.float32)
        self._most = requests
        self._requests = 0

    def add(self, usage: Usage) -> None:
        """Count one more request."""
        self._requests = min(self._requests + 1, self._most)
        KERNEL.blend(self.value, usage, self._requests)


def usage_of(counts: ExpertCounts) -> Usage:
    """Shares of the counted tokens that chose each expert; at least one was counted."""
    return KERNEL.usage(counts.counts, counts.covered, MOST)


LEAST_IN_ROW = -14_472_784
"""The least that a request brings for an expert: 2^20 log(1 - MOST), and room for the rounding of other hosts."""


class LiveBatches:
    """One batch for each decode group: how many experts it activates now, and what one more request will add.

        idle[g, e] = product over the group's requests i of (1 - usage[i, e])
        active[g]  = sum over e of (1 - idle[g, e])

    with e over the (layer, expert) pairs: each request uses an expert with a probability of its own, independently of
    the others.  The product is kept as a sum of logarithms in whole multiples of 2^-20.  Whole numbers add without
    rounding, so a request that leaves takes away exactly what it brought: nothing drifts, however long it runs, and
    the result does not depend on who came first.

    What a request will add is asked of another batch: of as many requests as groups have on average, composed as this
    one is.  A group's requests all leave within one request's life and others come; how many they will be tells the
    mean better than the present does, while what they use stays alike, since like joins like.

        alike[g, e] = exp(load * (sum over i of log(1 - usage[i, e]) + m log(1 - before[g, e])) / (n[g] + m))

    `before` is the mean of the group's last 100 requests, m = 2: it speaks where few are in flight, or none.

    Args:
        groups: names of the groups.
        geometry: of the model.
        others: requests of other gateways, which count from each `take_in`; None where there are none.

    Attributes:
        geometry: of the model.
        active: `[G]`, expected (layer, expert) pairs that a step activates.
        requests: `[G]`, requests in flight.
    """

    def __init__(self, groups: Sequence[str], geometry: ModelGeometry, others: OtherBatches | None = None) -> None:
        self.geometry = geometry
        self._others = others
        pairs = geometry.layers * geometry.experts
        self.active = [0.0] * len(groups)
        self._position = {group: g for g, group in enumerate(groups)}
        self.requests = [0] * len(groups)
        self._batches = KERNEL.batches(len(groups), pairs)
        self._pairs = pairs
        self._came = [0] * len(groups)  # requests that `before` is of
        self._changed = set(range(len(groups)))  # whose composition is to be made anew, once somebody asks
        self._load = 0.0

    def join(self, group: str, usage: Usage) -> Row:
        """A request begins.

        Args:
            group: where.
            usage: what it uses.

        Returns:
            `row_of` the usage, for when it leaves.
        """
        g = self._position[group]
        self._came[g] = min(self._came[g] + 1, _REMEMBERED_HERE)
        row, idle = self._batches.join(g, usage, self._came[g])
        self._changes(g, +1, idle)
        if self._others is not None:
            self._others.show(g, row, +1)
        return row

    def leave(self, group: str, row: Row) -> None:
        """One that joined is over."""
        g = self._position[group]
        self._changes(g, -1, self._batches.grow(g, row, -1))
        if self._others is not None:
            self._others.show(g, row, -1)

    def take_in(self) -> None:
        """Let the requests of other gateways count as they are now."""
        for g, requests, sums in () if self._others is None else self._others.changed():
            self._changes(g, requests, self._batches.grow(g, sums))

    def places(self, groups: Sequence[str]) -> list[int]:
        """Positions of groups in `active` and in what `added` returns."""
        return [self._position[group] for group in groups]

    def added(self, usage: Usage, load: float) -> npt.NDArray[np.float64]:
        """Active experts that one more request adds to each group's typical batch, `[G]`.

        Args:
            usage: of the request.
            load: requests of a group, on average; that of an earlier call serves within a sixteenth.
        """
        if abs(load - self._load) > _STALE * self._load:
            self._load = load
            self._changed.update(range(len(self._came)))
        while self._changed:
            g = self._changed.pop()
            self._batches.compose(g, self._load / (self.requests[g] + _LIKE_BEFORE), _LIKE_BEFORE)
        return self._batches.products(usage)

    def _changes(self, g: int, requests: int, idle: float) -> None:
        self.requests[g] += requests
        self.active[g] = self._pairs - idle
        self._changed.add(g)
