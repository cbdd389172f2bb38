"""The work of an expert server: replies to requests, whatever brings them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.experts.protocol import Reply, Request, Status, is_stale
from coterie.experts.server.batches import Batch, merge
from coterie.experts.server.holdings import Holding
from coterie.experts.server.kernels import Kernel, WeightsT
from coterie.experts.server.usage import Usage
from coterie.modeling.expert_tensors import ExpertModel


class ExpertServer(Generic[WeightsT]):
    """Computes the experts that it holds.  It keeps nothing of a request.

    Args:
        model: whose experts they are.
        kernel: what computes them.
        holding: the experts, in the kernel's form.
        clock: by which the time spent computing is counted.

    Attributes:
        usage: what it has computed so far, without what `tally` has not counted yet.
    """

    def __init__(
        self,
        model: ExpertModel,
        kernel: Kernel[WeightsT],
        holding: Holding[WeightsT],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.kernel, self.usage = model, kernel, Usage.of(model.geometry)
        self._holding, self._clock, self._changing = holding, clock, threading.Lock()
        self._uncounted: list[tuple[Batch, float]] = []

    @property
    def holding(self) -> Holding[WeightsT]:
        """What it holds now."""
        return self._holding

    def replace(self, holding: Holding[WeightsT]) -> None:
        """Have other experts from now on; requests under way are computed with those that it had.

        Requests of clients that have not heard of the new epoch are then refused as stale.

        Raises:
            InputError: the epoch is not a later one.
        """
        with self._changing:
            before = self._holding.since
            if holding.since <= before:
                raise InputError(f"expert server: experts since epoch {holding.since}; must be after {before}")
            self._holding = holding

    def date(self, since: int) -> None:
        """Take it from the monitor since when it has the experts that it has; an earlier epoch changes nothing."""
        with self._changing:
            if since > self._holding.since:
                self._holding = dataclasses.replace(self._holding, since=since)

    def compute(self, requests: Sequence[Request]) -> list[Reply]:
        """Reply to requests that the protocol's layout has checked; those that go together are merged.

        One thread calls it.
        """
        holding = self._holding  # once: it may be replaced meanwhile
        replies: dict[int, Reply] = {}
        wanted: list[tuple[int, Request]] = []
        for number, request in enumerate(requests):
            if status := _refusal(holding, request):
                replies[number] = self._refuse(holding, status)
            else:
                wanted.append((number, request))
        for batch in merge(wanted):
            for number, sums in zip(batch.members, self._sums(holding, batch), strict=True):
                replies[number] = Reply(holding.since, Status.COMPUTED, sums, batch.dtype)
        return [replies[number] for number in range(len(requests))]

    def tally(self) -> None:
        """Count what `compute` has computed: when replies have left, so that no client waits for it.

        The thread of `compute` calls it.
        """
        for batch, seconds in self._uncounted:
            self.usage.add(batch, seconds)
        self._uncounted.clear()

    def _refuse(self, holding: Holding[WeightsT], status: Status) -> Reply:
        self.usage.requests[status] += 1
        return Reply(holding.since, status, np.empty((0, self.model.hidden), np.float32))

    def _sums(self, holding: Holding[WeightsT], batch: Batch) -> list[npt.NDArray[Any]]:
        started_s = self._clock()
        layer = holding.layers[batch.layer]
        assert layer is not None, "requests for it were refused"
        sums = self.kernel.compute(layer.weights, batch.hidden, layer.places[batch.ids], batch.router)
        parts = batch.split(sums)
        self._uncounted.append((batch, self._clock() - started_s))
        return parts


def _refusal(holding: Holding[WeightsT], request: Request) -> Status | None:
    """Why a request is not computed."""
    if is_stale(request.epoch, holding.since):
        return Status.STALE
    layer = holding.layers[request.layer]
    if layer is None or layer.lacks(request.ids):
        return Status.ABSENT
    return None
