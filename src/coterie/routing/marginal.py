"""Marginal cost: a request decodes where it adds least to the time of everyone's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from coterie.core import Decision, ExpertCounts, ModelGeometry, RouteRequest, Served, WorkerState
from coterie.counting import Row
from coterie.routing.ledger import Lease
from coterie.routing.load import load_only
from coterie.routing.locality import groups_of
from coterie.routing.marginal_batches import LiveBatches, MeanUsage, OtherBatches, Usage, usage_of
from coterie.routing.policy import Reads
from coterie.routing.step_model import Meter, Seen, StepModel

Share = Callable[[Sequence[str], ModelGeometry], OtherBatches]
"""How to know of the requests of other gateways, by the names of the groups and the geometry of the model."""

_NOW = 0.75
_BOUND = 1.25


@runtime_checkable
class Sharing(Protocol):
    """A policy that keeps what requests in flight use, and can know of those of other gateways."""

    def share(self, share: Share) -> None:
        """Let the requests of other gateways count; called before the first lease."""
        ...


class Marginal:
    """Least marginal cost under a bounded load, from the requests in flight alone: no centroids, no calibration.

        step[k]  = active[k] + b n[k]                       how long a step takes there now
        added[k] = sum over e of usage[e] * alike[k, e]     experts that only this request will activate there
        cost[k]  = 3/4 step[k] + (n + 1) added[k]
        eligible = {k : n[k] <= 1.25 n + 1}
        worker   = argmin cost over the eligible

    with n the mean of n[k], e over the (layer, expert) pairs, and times in those of one active expert.

    What the request adds to a step there, all of the batch waits for, itself included: (n + 1) added.  The batch is
    that of its life, not of this moment: as many as workers hold on average, composed as this worker's
    (`LiveBatches`).  A longer step than elsewhere only the request itself meets, and only for a while: what is in
    flight leaves evenly over the request's life, which would leave half of the difference if nothing of it were to
    last, and all if everything were; 3/4 is the middle.  No likeness makes a batch larger than the bound: b n[k]
    stands for all that grows with a batch, and no engine is that straight.  Both 3/4 and 1.25 were chosen once, by
    simulation, for all workloads.

    `usage` is the share of the prompt's tokens that chose an expert; a request without counts is taken to use what
    requests use on average.  b is learned from the times between tokens (`StepModel`); the fixed part of a step is the
    same everywhere and does not matter.

    Groups of several ranks share a batch's experts, and load chooses among the ranks.

    It follows the ledger (`Watcher`).  Requests of other gateways count, too, if `share` says how to know of them: what
    they use as of the last tick of its `Background`, since that changes slowly.

    Args:
        targets: all workers that may ever be chosen from, in the gateway's order.
    """

    name = "marginal"
    reads = frozenset({Reads.COUNTS})

    def __init__(self, targets: Sequence[WorkerState]) -> None:
        self._groups = groups_of(targets)
        self._ranks = len(targets) / len(self._groups)
        self._group_of = {target.name: target.group for target in targets}
        self._pool: _Pool | None = None  # until the first counts tell the geometry
        self._share: Share | None = None

    def share(self, share: Share) -> None:
        """See `Sharing.share`."""
        assert self._pool is None, "some requests are already in flight"
        self._share = share

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the worker of least marginal cost."""
        if self._pool is None:
            return load_only(workers, "no counts", request.counts_problem or "")
        batches = self._pool.batches
        places = batches.places([worker.group for worker in workers])
        requests = [worker.requests for worker in workers]
        load, each = sum(requests) / len(workers), self._pool.times.per_request
        added = batches.added(self._pool.usage(request), load * self._ranks).tolist()
        costs = [
            _NOW * (batches.active[place] + each * held) + (load + 1) * added[place]
            for place, held in zip(places, requests, strict=True)
        ]
        most = _BOUND * load + 1
        eligible = [k for k, held in enumerate(requests) if held <= most]
        best = min(eligible, key=lambda k: (costs[k], requests[k], workers[k].assigned, workers[k].name))
        return Decision(
            workers[best].name,
            "marginal cost",
            scores=tuple([(worker.name, -cost) for worker, cost in zip(workers, costs, strict=True)]),
            candidates=tuple([workers[k].name for k in eligible]),
        )

    def leased(self, lease: Lease, now_s: float) -> None:
        """See `Watcher.leased`."""
        counts = lease.request.counts
        if self._pool is None and counts is not None and counts.covered:
            others = self._share and self._share(self._groups, counts.geometry)
            self._pool = _Pool(self._groups, counts.geometry, others)
        if self._pool is not None:
            self._pool.begin(lease, self._group_of[lease.worker], now_s)

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        """See `Watcher.released`."""
        if self._pool is not None:
            self._pool.end(lease, served, now_s)

    def due(self, workers: Sequence[WorkerState], now_s: float) -> None:
        """See `Background.due`: the requests of other gateways are taken in; there is no job."""
        if self._pool is not None:
            self._pool.batches.take_in()

    def install(self, outcome: Any, now_s: float) -> None:
        """See `Background.install`: never called."""


class _Held(msgspec.Struct, frozen=True, eq=False):
    group: str
    row: Row
    begun: Seen


class _Pool:
    """What is known of the requests in flight and of those before."""

    def __init__(self, groups: Sequence[str], geometry: ModelGeometry, others: OtherBatches | None) -> None:
        self.batches = LiveBatches(groups, geometry, others)
        self.mean = MeanUsage(geometry.layers * geometry.experts)
        self.times = StepModel(geometry.layers * geometry.top_k)
        self._meters = {group: Meter() for group in groups}
        self._held: dict[Lease, _Held] = {}
        self._last: tuple[ExpertCounts, Usage] | None = None  # a lease follows the choice, of the same counts

    def usage(self, request: RouteRequest) -> Usage:
        counted = self._counted(request)
        return self.mean.value if counted is None else counted

    def begin(self, lease: Lease, group: str, now_s: float) -> None:
        counted = self._counted(lease.request)
        if counted is not None:
            self.mean.add(counted)
        usage = self.mean.value if counted is None else counted
        begun = self._advance(group, now_s)
        self._held[lease] = _Held(group, self.batches.join(group, usage), begun)

    def end(self, lease: Lease, served: Served | None, now_s: float) -> None:
        held = self._held.pop(lease, None)
        if held is None:
            return
        ended = self._advance(held.group, now_s)
        self.batches.leave(held.group, held.row)
        if served is not None and served.step_s is not None:
            self.times.observe(held.begun, ended, served.step_s)

    def _counted(self, request: RouteRequest) -> Usage | None:
        counts = request.counts
        if counts is None or not counts.covered or counts.geometry != self.batches.geometry:
            return None
        if self._last is None or self._last[0] is not counts:
            self._last = (counts, usage_of(counts))
        return self._last[1]

    def _advance(self, group: str, now_s: float) -> Seen:
        (place,) = self.batches.places([group])
        return self._meters[group].advance(now_s, self.batches.requests[place], self.batches.active[place])
