"""What a server has computed, counted where the experts run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.experts.protocol import Status
from coterie.experts.server.batches import Batch

Load = npt.NDArray[np.int64]

SIZES = 26
"""Classes of batch sizes: class n has batches of less than 2^n tokens, and not less than half of that."""


@dataclass(slots=True, eq=False)
class Usage:
    """Counts since the server started; one thread writes.

    Attributes:
        requests: by status; those that could not be read do not come this far.
        batches: how many were computed.
        merged: how many requests were in them.
        tokens: how many tokens were in them.
        active: how many different experts they had, summed over batches.
        sizes: `[SIZES]` batches by their number of tokens.
        busy_s: time spent computing.
    """

    requests: dict[Status, int]
    batches: int
    merged: int
    tokens: int
    active: int
    sizes: list[int]
    busy_s: float
    _load: Load = field(repr=False)

    @classmethod
    def of(cls, geometry: ModelGeometry) -> Usage:
        """Nothing yet."""
        load = np.zeros((geometry.layers, geometry.experts + 1), np.int64)  # the first for -1, another server's
        return cls(dict.fromkeys(Status, 0), 0, 0, 0, 0, [0] * SIZES, 0.0, load)

    @property
    def load(self) -> Load:
        """`[L, E]`: tokens that each expert has computed."""
        return self._load[:, 1:].copy()

    def add(self, batch: Batch, seconds: float) -> None:
        """Count a batch that was computed, and how long that took."""
        tokens = len(batch.ids)
        self.requests[Status.COMPUTED] += len(batch.members)
        self.batches += 1
        self.merged += len(batch.members)
        self.tokens += tokens
        self.sizes[min(tokens.bit_length(), SIZES - 1)] += 1
        self.busy_s += seconds
        counts = np.bincount(batch.ids.ravel() + 1, minlength=self._load.shape[1])
        self.active += int(np.count_nonzero(counts[1:]))
        self._load[batch.layer] += counts
