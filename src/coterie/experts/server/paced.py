"""A kernel that takes its time: servers of a known capacity, for trials of sizes and placements on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Generic

from coterie.errors import ConfigError
from coterie.experts.server.kernels import Kernel, WeightsT
from coterie.modeling.expert_tensors import Expert, ExpertModel
from coterie.modeling.gates import Ids
from coterie.modeling.tiles import Floats


class PacedKernel(Generic[WeightsT]):
    """Another kernel, at most so fast: a batch of n pairs of token and expert takes n / `pairs_per_s`.

    Sleep takes longer than it should: what it was late is taken off the next batch.

    Args:
        kernel: what computes.
        pairs_per_s: the most in a second.
        clock: seconds.
        sleep: for so many seconds.

    Raises:
        ConfigError: `pairs_per_s` is not positive.
    """

    def __init__(
        self,
        kernel: Kernel[WeightsT],
        pairs_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not pairs_per_s > 0:
            raise ConfigError(f"expert server: at most {pairs_per_s} pairs in a second; it must be positive")
        self._kernel, self._pairs_per_s, self._clock, self._sleep = kernel, pairs_per_s, clock, sleep
        self._late_s = 0.0  # of the last batch
        self.name = f"{kernel.name}, at most {pairs_per_s:g} pairs/s"

    def check(self, model: ExpertModel) -> None:
        """As `Kernel.check`."""
        self._kernel.check(model)

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> WeightsT:
        """As `Kernel.pack`."""
        return self._kernel.pack(model, count, experts)

    def compute(self, weights: WeightsT, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `Kernel.compute`, and then sleeps for what is left of the batch's time."""
        ends_s = self._clock() - self._late_s + int((places >= 0).sum()) / self._pairs_per_s
        self._late_s = 0.0
        sums = self._kernel.compute(weights, rows, places, router)
        if (left_s := ends_s - self._clock()) > 0:
            self._sleep(left_s)
            self._late_s = self._clock() - ends_s
        return sums
