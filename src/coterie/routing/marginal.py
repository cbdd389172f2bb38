"""Marginal cost: a request decodes where it adds least to the time of everyone's steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.core import Decision, RouteRequest, Served, WorkerState
from coterie.routing.ledger import Lease
from coterie.routing.load import load_only
from coterie.routing.locality import groups_of
from coterie.routing.marginal_batches import LiveBatches, MeanUsage, Row, Usage, row_of, usage_of
from coterie.routing.policy import Reads

OTHERS = 0.5
SLACK = 0.3
PER_REQUEST = 0.03


class Marginal:
    """Least marginal cost under a bounded load, from the requests in flight alone: no centroids, no calibration.

        added[k] = sum over e of usage[e] * idle[k, e]             experts that only this request would activate there
        own[k]   = active[k] + added[k] + b * (n[k] + 1)           its own step there
        cost[k]  = own[k] + w * n[k] * (added[k] + b)              and what it adds to the steps of the n others
        eligible = {k : n[k] + 1 <= (1 + eps) * (mean n + 1)}
        worker   = argmin cost over the eligible

    The unit is the time that one more active expert takes; b is what a request costs besides experts.  `usage` is the
    share of the prompt's tokens that chose an expert, `idle` the product over the worker's requests of its complement.
    A request without counts is taken to use what requests use on average.

    It follows the ledger (`Watcher`).

    Args:
        targets: all workers that may ever be chosen from, in the gateway's order.
    """

    name = "marginal"
    reads = frozenset({Reads.COUNTS})

    def __init__(self, targets: Sequence[WorkerState]) -> None:
        self._groups = groups_of(targets)
        self._group_of = {target.name: target.group for target in targets}
        self._batches: LiveBatches | None = None  # until the first counts tell the geometry
        self._mean = MeanUsage()
        self._held: dict[Lease, Row] = {}

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the worker of least marginal cost."""
        usage = self._usage(request)
        if usage is None or self._batches is None:
            return load_only(workers, "no counts", request.counts_problem or "")
        costs = self._costs(usage, workers, self._batches)
        most = (1 + SLACK) * (sum(worker.requests for worker in workers) / len(workers) + 1)
        eligible = [k for k, worker in enumerate(workers) if worker.requests + 1 <= most]
        best = min(eligible, key=lambda k: (costs[k], workers[k].requests, workers[k].assigned, workers[k].name))
        return Decision(
            workers[best].name,
            "marginal cost",
            scores=tuple((worker.name, -cost) for worker, cost in zip(workers, costs, strict=True)),
            candidates=tuple(workers[k].name for k in eligible),
        )

    def leased(self, lease: Lease, now_s: float) -> None:
        """See `Watcher.leased`."""
        usage = self._usage(lease.request)
        if usage is None:
            return
        counts = lease.request.counts
        if self._batches is None:
            assert counts is not None
            self._batches = LiveBatches(self._groups, counts.geometry)
        if counts is not None:
            self._mean.add(usage)
        row = self._held[lease] = row_of(usage)
        self._batches.join(self._group_of[lease.worker], row)

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        """See `Watcher.released`."""
        row = self._held.pop(lease, None)
        if row is not None and self._batches is not None:
            self._batches.leave(self._group_of[lease.worker], row)

    def _usage(self, request: RouteRequest) -> Usage | None:
        counts = request.counts
        known = counts is not None and counts.covered > 0
        if counts is None or not known or (self._batches is not None and counts.geometry != self._batches.geometry):
            return self._mean.value
        return usage_of(counts)

    def _costs(self, usage: Usage, workers: Sequence[WorkerState], batches: LiveBatches) -> list[float]:
        places = batches.places([worker.group for worker in workers])
        each = PER_REQUEST * batches.geometry.layers * batches.geometry.top_k
        others = batches.requests[places]
        added = batches.added(usage)[places] + each
        costs: list[float] = (batches.active[places] + each * others + added + OTHERS * others * added).tolist()
        return costs
