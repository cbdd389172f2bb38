"""A prefill/decode cluster behind one gateway or several: the life of `gateway.legs.dispatch` on simulated workers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from coterie.clock import Clock
from coterie.core import Decision, Role, RouteRequest, Served, WorkerState
from coterie.errors import ConfigError, NoWorkerError
from coterie.metrics import RequestTimeline
from coterie.routing import (
    STALE_AFTER,
    Background,
    Filter,
    Lease,
    LeaseTotals,
    Ledger,
    Others,
    Policy,
    Sharing,
    random_stream,
    route,
)
from coterie.sim.background import BackgroundWork
from coterie.sim.decode import DecodeGroup, StepTotals
from coterie.sim.exchange import Exchange
from coterie.sim.experts import Experts
from coterie.sim.kernel import Kernel, Priority
from coterie.sim.outcomes import Outcomes
from coterie.sim.spec import Change, ClusterSpec
from coterie.sim.workers import PrefillWorker, PrefixCache, Task, Worker
from coterie.sim.workload import Arrival


@dataclass(frozen=True, slots=True)
class Census:
    """Where the requests are: `arrived == finished + failed + queued + running` at any time.

    Attributes:
        arrived: came in so far.
        finished: had their last token.
        failed: were not served: no worker was available, or theirs was lost.
        queued: wait at a worker, or for their KV.
        running: are in a prefill or decode step.
    """

    arrived: int
    finished: int
    failed: int
    queued: int
    running: int


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """A worker was chosen.

    Attributes:
        time_s: when.
        role: of the worker.
        arrival: for which request.
        decision: what the policy said.
    """

    time_s: float
    role: Role
    arrival: Arrival
    decision: Decision


_ENTRANCES = 5  # of the streams of chance: to which gateway requests come; see `workload` for the others

OnDecision = Callable[[Decided], object]


class _Fleet:
    """The workers of one role, the ledger of what each holds, and the policy that chooses among them."""

    def __init__(
        self,
        role: Role,
        targets: Sequence[WorkerState],
        workers: Sequence[Worker],
        policy: Policy,
        seed: int,
        clock: Clock,
        filters: Sequence[Filter] = (),
        others: Others | None = None,
        process: int = 0,
    ):
        self.role = role
        self.ledger = Ledger(targets, clock, others=others)
        self.ledger.follow(policy)
        self.workers = {target.name: worker for target, worker in zip(targets, workers, strict=True)}
        self._policy = policy
        self._filters = filters
        self._rng = random_stream(seed, role, process)

    def choose(self, request: RouteRequest) -> Decision:
        return route(self._policy, request, self.ledger.states(), self._rng, self._filters)

    def is_available(self) -> bool:
        return any(state.available for state in self.ledger.states())


class Cluster:
    """Gateways with their workers.

    Load is counted, workers are chosen and leases end exactly as in `gateway.legs.dispatch`: prefill worker, lease,
    prefill, release; then, with the prompt's counts, decode worker, lease, decode, release.  Only where prefill workers
    give the first token (`ClusterSpec.prefill_first`) does a request of a single token end without a decode worker.

    Args:
        kernel: runs it.
        spec: what it consists of.
        experts: which experts the requests use.
        prefill: policy for prefill workers; each further gateway has a copy of it, and of the next.
        decode: policy for decode workers.
        seed: of the policies' chance, and of the gateways that requests come to.
        warm_up_s: what comes before is served, and is in no figure.
        on_decision: told of every decision.

    Attributes:
        outcomes: of the requests that arrived since.
        end_s: when the last request ended, so far.

    Raises:
        ConfigError: `warm_up_s` is negative or not finite.
    """

    def __init__(
        self,
        kernel: Kernel,
        spec: ClusterSpec,
        experts: Experts,
        *,
        prefill: Policy,
        decode: Policy,
        seed: int = 0,
        warm_up_s: float = 0.0,
        on_decision: OnDecision | None = None,
    ) -> None:
        if not (math.isfinite(warm_up_s) and warm_up_s >= 0):
            raise ConfigError(f"cluster: warm_up_s must be finite and not negative, got {warm_up_s}")
        self.outcomes = Outcomes(warm_up_s)
        self._kernel = kernel
        self._spec = spec
        self._groups = new_decode_groups(kernel, spec, experts)
        prefillers = [new_prefill_worker(kernel, spec) for _ in range(spec.prefill)]
        decoders = [rank for group in self._groups for rank in group.ranks]
        _lose_absent(spec.targets("prefill"), prefillers)
        _lose_absent(spec.targets("decode"), decoders)
        if spec.filters:
            kernel.every(spec.reading_interval_s, self._read)
        self._prefill = self._make_fleets("prefill", prefillers, prefill, seed)
        self._decode = self._make_fleets("decode", decoders, decode, seed)
        self._ranks = dict(zip(self._decode[0].workers, decoders, strict=True))
        self._entrances = np.random.default_rng([seed, _ENTRANCES])
        self._on_decision = on_decision
        self.end_s = 0.0
        self._arrived = self._finished = self._failed = 0
        kernel.at(warm_up_s, Priority.CHANGE, self._begin_to_count)

    def _make_fleets(self, role: Role, workers: Sequence[Worker], policy: Policy, seed: int) -> list[_Fleet]:
        """The fleet of each gateway, and what it knows of the others."""
        spec, kernel = self._spec, self._kernel
        policies = [policy, *(copy.deepcopy(policy) for _ in range(spec.gateways - 1))]
        exchange = None
        if spec.gateways > 1 and spec.exchange_s is not None:
            exchange = Exchange(kernel, spec.gateways, spec.exchange_s)
        fleets = []
        for i, one in enumerate(policies):
            if exchange is not None and spec.exchange_batches and isinstance(one, Sharing):
                one.share(exchange.batches)
            others = None if exchange is None else exchange.loads[i]
            filters = spec.filters if role == "decode" else ()
            fleets.append(_Fleet(role, spec.targets(role), workers, one, seed, kernel, filters, others, i))
            if role == "decode" and isinstance(one, Background):
                BackgroundWork(kernel, one, fleets[i].ledger)
        return fleets

    def feed(self, arrivals: Iterator[Arrival]) -> None:
        """Let requests arrive; only the next one is ever made."""
        arrival = next(arrivals, None)
        if arrival is not None:
            self._kernel.at(arrival.time_s, Priority.ARRIVAL, self._arrive, arrival, arrivals)

    def plan(self, changes: Sequence[Change]) -> None:
        """Let workers be lost and join.

        Raises:
            ConfigError: no worker has this name, or the time is past.
        """
        for change in changes:
            self._spec.members(change.worker)
            if not self._kernel.now() <= change.time_s < math.inf:
                raise ConfigError(f"changes: {change.worker} {change.kind} at {change.time_s} s, which is not to come")
        for change in changes:
            role, names = self._spec.members(change.worker)
            action = self._lose if change.kind == "lost" else self._join
            self._kernel.at(change.time_s, Priority.CHANGE, action, self._fleets(role), names)

    def census(self) -> Census:
        """Where the requests are now."""
        workers = [*self._prefill[0].workers.values(), *self._decode[0].workers.values()]
        return Census(
            arrived=self._arrived,
            finished=self._finished,
            failed=self._failed,
            queued=sum(worker.queued for worker in workers),
            running=sum(worker.running for worker in workers),
        )

    def states(self, role: Role) -> tuple[WorkerState, ...]:
        """What the role's policy would see now, at the first gateway."""
        return self._fleets(role)[0].ledger.states()

    def view_error(self, role: Role) -> float:
        """Requests by which gateways see a worker's load wrong now, mean over gateways and workers."""
        ledgers = [fleet.ledger for fleet in self._fleets(role)]
        seen = np.array([[state.requests for state in ledger.states()] for ledger in ledgers])
        held = np.array([[load.requests for load in ledger.own().values()] for ledger in ledgers])
        return float(np.abs(seen - held.sum(axis=0)).mean())

    def totals(self) -> tuple[StepTotals, ...]:
        """Sums over the steps of each decode group, since the warm-up."""
        return tuple(group.totals for group in self._groups)

    def leases(self) -> dict[str, LeaseTotals]:
        """What each decode worker was given, by name, warm-up included."""
        totals: dict[str, LeaseTotals] = {}
        for fleet in self._decode:
            for name, more in fleet.ledger.totals().items():
                known = totals.get(name, LeaseTotals(0, 0))
                totals[name] = LeaseTotals(known.given + more.given, known.released + more.released)
        return totals

    def _fleets(self, role: Role) -> list[_Fleet]:
        return self._prefill if role == "prefill" else self._decode

    # --- one request's life ---

    def _arrive(self, arrival: Arrival, rest: Iterator[Arrival]) -> None:
        self._arrived += 1
        self.outcomes.arrive(arrival.time_s)
        asked = replace(arrival.request, prompt_tokens=0, counts=None)  # as the gateway knows it before prefill
        gateway = int(self._entrances.integers(self._spec.gateways)) if self._spec.gateways > 1 else 0
        if self._decode[gateway].is_available():
            self._send(self._prefill[gateway], asked, arrival, partial(self._prefilled, gateway))
        else:
            self._fail(arrival)
        self.feed(rest)

    def _prefilled(self, gateway: int, arrival: Arrival, lease: Lease, task: Task, done: bool) -> None:
        lease.release()
        first_s = self._kernel.now() if self._spec.prefill_first else None
        if not done:
            self._fail(arrival)
        elif first_s is not None and task.output_tokens == 1:
            self._finish(arrival, first_s)
        else:
            given = 0 if first_s is None else 1
            self._send(self._decode[gateway], arrival.request, arrival, partial(self._decoded, first_s), given)

    def _decoded(self, first_s: float | None, arrival: Arrival, lease: Lease, task: Task, done: bool) -> None:
        if not done:
            lease.release()
            self._fail(arrival)
            return
        assert task.first_token_s is not None
        lease.release(Served(task.output_tokens, self._kernel.now() - task.first_token_s))
        self._finish(arrival, task.first_token_s if first_s is None else first_s)

    def _send(
        self, fleet: _Fleet, routed: RouteRequest, arrival: Arrival, then: Callable[..., None], given: int = 0
    ) -> None:
        try:
            decision = fleet.choose(routed)
        except NoWorkerError:
            self._fail(arrival)
            return
        if self._on_decision is not None:
            self._on_decision(Decided(self._kernel.now(), fleet.role, arrival, decision))
        lease = fleet.ledger.lease(decision.worker, routed)
        fleet.workers[decision.worker].submit(task_of(arrival, partial(then, arrival, lease), given))

    def _finish(self, arrival: Arrival, first_s: float) -> None:
        self._finished += 1
        self.end_s = self._kernel.now()
        timeline = RequestTimeline(arrival.time_s, first_s, self.end_s, arrival.request.output_tokens)
        self.outcomes.finish(timeline, arrival.position)

    def _fail(self, arrival: Arrival) -> None:
        self._failed += 1
        self.end_s = self._kernel.now()
        self.outcomes.fail(arrival.time_s, self.end_s)

    def _read(self) -> None:
        """Let decode workers say how they are, as `gateway.fleet.readings` does."""
        for name, rank in self._ranks.items():
            if rank.up:
                for fleet in self._decode:
                    fleet.ledger.observe(name, rank.reading, STALE_AFTER * self._spec.reading_interval_s)

    def _begin_to_count(self) -> None:
        for group in self._groups:
            group.totals = StepTotals()

    # --- workers that come and go ---

    def _lose(self, fleets: Sequence[_Fleet], names: Sequence[str]) -> None:
        fleets[0].workers[names[0]].lose()
        self._kernel.after(self._spec.notice_s, Priority.CHANGE, self._notice, fleets, names)

    def _notice(self, fleets: Sequence[_Fleet], names: Sequence[str]) -> None:
        for name in names:
            if not fleets[0].workers[name].up:
                for fleet in fleets:
                    fleet.ledger.set_available(name, False)

    def _join(self, fleets: Sequence[_Fleet], names: Sequence[str]) -> None:
        fleets[0].workers[names[0]].revive()
        for name in names:
            for fleet in fleets:
                fleet.ledger.set_available(name, True)


def _lose_absent(targets: Sequence[WorkerState], workers: Sequence[Worker]) -> None:
    for target, worker in zip(targets, workers, strict=True):
        if not target.available:
            worker.lose()


def new_prefill_worker(kernel: Kernel, spec: ClusterSpec) -> PrefillWorker:
    """A prefill worker as the cluster has them."""
    new_cache = partial(PrefixCache, spec.cache_tokens, spec.block_tokens)
    return PrefillWorker(kernel, spec.prefill_time, spec.prefill_budget_tokens, new_cache)


def new_decode_groups(kernel: Kernel, spec: ClusterSpec, experts: Experts) -> list[DecodeGroup]:
    """The decode groups of a cluster.

    Raises:
        ConfigError: a placement is of another geometry, or there are more ranks than experts.
    """
    geometry = experts.geometry
    shape = (geometry.layers, geometry.experts)
    if spec.holders > geometry.experts:
        raise ConfigError(f"cluster: {spec.holders} ranks for {geometry.experts} experts")
    for placement in spec.placements:
        if placement.replicas.shape != shape or (placement.replicas != 1).any():
            raise ConfigError(
                f"cluster: a placement of {placement.replicas.shape} experts, {placement.experts.shape[1]} slots; the "
                f"model has {shape}, and each needs one slot"
            )
    placements = spec.placements or (None,) * spec.decode
    return [DecodeGroup(kernel, spec, experts, placement) for placement in placements]


def task_of(arrival: Arrival, on_end: Callable[[Task, bool], None], given: int = 0) -> Task:
    """A request's part at one worker; `given` of its output tokens came from elsewhere."""
    request = arrival.request
    prompt = request.prompt_hash or request.id  # without a hash, no prompt is like another
    return Task(arrival.position, prompt, request.prompt_tokens, request.output_tokens - given, on_end)
