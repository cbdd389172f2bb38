"""A prefill/decode cluster behind one gateway: the life of `gateway.dispatch` on simulated workers."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from coterie.clock import Clock
from coterie.core import Decision, Role, RouteRequest, Served, WorkerState
from coterie.errors import ConfigError, NoWorkerError
from coterie.latency import HANDOFF_400G, PREFILL_MI300X, QWEN3_30B_MI300X, StepTime, TokenTime
from coterie.metrics import RequestTimeline
from coterie.routing import Lease, Ledger, Policy, random_stream, route
from coterie.sim.experts import Experts
from coterie.sim.kernel import Kernel, Priority
from coterie.sim.workers import DecodeWorker, PrefillWorker, PrefixCache, StepTotals, Task, Worker
from coterie.sim.workload import Arrival

ROLES: tuple[Role, ...] = get_args(Role)

_TOPOLOGY = re.compile(r"([1-9]\d{0,3})P([1-9]\d{0,3})D")


@dataclass(frozen=True, slots=True)
class Change:
    """A worker is lost, or comes (back) to the cluster.

    Attributes:
        time_s: when.
        worker: its name, such as `decode-3`.
        kind: `lost` or `joined`.
    """

    time_s: float
    worker: str
    kind: Literal["lost", "joined"]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster.

    Attributes:
        prefill: number of prefill workers, `prefill-0` and so on.
        decode: number of decode workers, `decode-0` and so on, each an expert-parallel group of its own.
        step_time: of decode steps.
        prefill_time: of a prefill step, by the tokens that it computes.
        handoff_time: from the choice of a decode worker until it holds the prompt's KV, by the prompt's tokens.
        prefill_budget_tokens: most tokens of a prefill step that has more than one prompt.
        batch_requests: most requests of a decode step.
        cache_tokens: tokens that the prefix cache of a prefill worker holds; 0 for none.
        block_tokens: tokens of a KV block.
        notice_s: time until the gateway learns that a worker was lost; requests that it sends there meanwhile fail.
        absent: workers that are not there at the start.

    Raises:
        ConfigError: a number is out of range, or an absent worker does not exist.
    """

    prefill: int
    decode: int
    step_time: StepTime = QWEN3_30B_MI300X
    prefill_time: TokenTime = PREFILL_MI300X
    handoff_time: TokenTime = HANDOFF_400G
    prefill_budget_tokens: int = 8192
    batch_requests: int = 256
    cache_tokens: int = 0
    block_tokens: int = 16
    notice_s: float = 3.0
    absent: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "prefill_budget_tokens", "batch_requests", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster: {name} must be at least 1, got {getattr(self, name)}")
        if self.cache_tokens < 0 or not (math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise ConfigError(
                f"cluster: cache_tokens and notice_s must not be negative, got {self.cache_tokens}, {self.notice_s}"
            )
        if unknown := self.absent - {target.name for role in ROLES for target in self.targets(role)}:
            raise ConfigError(f"cluster: no worker is named {min(unknown)!r}")

    def targets(self, role: Role) -> list[WorkerState]:
        """The workers of a role, named as the gateway names them."""
        names = [f"{role}-{i}" for i in range(self.prefill if role == "prefill" else self.decode)]
        return [WorkerState(name, name, available=name not in self.absent) for name in names]


def parse_topology(text: str) -> tuple[int, int]:
    """Numbers of prefill and decode workers from a text such as `8P16D`.

    Raises:
        ConfigError: the text is another.
    """
    found = _TOPOLOGY.fullmatch(text)
    if not found:
        raise ConfigError(f"topology: {text[:60]!r} is not like 8P16D (8 prefill and 16 decode workers)")
    return int(found[1]), int(found[2])


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
    ):
        self.role = role
        self.ledger = Ledger(targets, clock)
        self.ledger.follow(policy)
        self.workers = {target.name: worker for target, worker in zip(targets, workers, strict=True)}
        self._policy = policy
        self._rng = random_stream(seed, role)
        for target, worker in zip(targets, workers, strict=True):
            if not target.available:
                worker.lose()

    def choose(self, request: RouteRequest) -> Decision:
        return route(self._policy, request, self.ledger.states(), self._rng)

    def is_available(self) -> bool:
        return any(state.available for state in self.ledger.states())


class Cluster:
    """One gateway with its workers.

    Load is counted, workers are chosen and leases end exactly as in `gateway.dispatch`: prefill worker, lease, prefill,
    release; then, with the prompt's counts, decode worker, lease, decode, release.

    Args:
        kernel: runs it.
        spec: what it consists of.
        experts: which experts the requests use.
        prefill: policy for prefill workers.
        decode: policy for decode workers.
        seed: of the policies' chance.
        on_decision: told of every decision.

    Attributes:
        ttft_s: times to first token of the requests that finished, in order of their ends.
        tpot_s: times per output token of those with more than one.
        end_s: when the last request ended, so far.
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
        on_decision: OnDecision | None = None,
    ) -> None:
        self.ttft_s = array("d")
        self.tpot_s = array("d")
        self._kernel = kernel
        self._notice_s = spec.notice_s
        self._decoders = [new_decode_worker(kernel, spec, experts) for _ in range(spec.decode)]
        prefillers = [new_prefill_worker(kernel, spec) for _ in range(spec.prefill)]
        self._prefill = _Fleet("prefill", spec.targets("prefill"), prefillers, prefill, seed, kernel)
        self._decode = _Fleet("decode", spec.targets("decode"), self._decoders, decode, seed, kernel)
        self._on_decision = on_decision
        self.end_s = 0.0
        self._arrived = self._failed = 0

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
            if change.worker not in self._prefill.workers and change.worker not in self._decode.workers:
                raise ConfigError(f"changes: no worker is named {change.worker!r}")
            if not self._kernel.now() <= change.time_s < math.inf:
                raise ConfigError(f"changes: {change.worker} {change.kind} at {change.time_s} s, which is not to come")
        for change in changes:
            action = self._lose if change.kind == "lost" else self._join
            self._kernel.at(change.time_s, Priority.CHANGE, action, self._fleet_of(change.worker), change.worker)

    def census(self) -> Census:
        """Where the requests are now."""
        workers = [*self._prefill.workers.values(), *self._decode.workers.values()]
        return Census(
            arrived=self._arrived,
            finished=len(self.ttft_s),
            failed=self._failed,
            queued=sum(worker.queued for worker in workers),
            running=sum(worker.running for worker in workers),
        )

    def states(self, role: Role) -> tuple[WorkerState, ...]:
        """What the role's policy would see now."""
        return (self._prefill if role == "prefill" else self._decode).ledger.states()

    def totals(self) -> tuple[StepTotals, ...]:
        """Sums over the steps of each decode worker."""
        return tuple(worker.totals for worker in self._decoders)

    # --- one request's life ---

    def _arrive(self, arrival: Arrival, rest: Iterator[Arrival]) -> None:
        self._arrived += 1
        asked = replace(arrival.request, prompt_tokens=0, counts=None)  # as the gateway knows it before prefill
        if self._decode.is_available():
            self._send(self._prefill, asked, arrival, self._prefilled)
        else:
            self._fail()
        self.feed(rest)

    def _prefilled(self, arrival: Arrival, lease: Lease, task: Task, done: bool) -> None:
        lease.release()
        if done:
            self._send(self._decode, arrival.request, arrival, self._decoded)
        else:
            self._fail()

    def _decoded(self, arrival: Arrival, lease: Lease, task: Task, done: bool) -> None:
        if not done:
            lease.release()
            self._fail()
            return
        assert task.first_token_s is not None
        self.end_s = self._kernel.now()
        lease.release(Served(task.output_tokens, self.end_s - task.first_token_s))
        timeline = RequestTimeline(arrival.time_s, task.first_token_s, self.end_s, task.output_tokens)
        self.ttft_s.append(timeline.ttft_s)
        if timeline.tpot_s is not None:
            self.tpot_s.append(timeline.tpot_s)

    def _send(self, fleet: _Fleet, routed: RouteRequest, arrival: Arrival, then: Callable[..., None]) -> None:
        try:
            decision = fleet.choose(routed)
        except NoWorkerError:
            self._fail()
            return
        if self._on_decision is not None:
            self._on_decision(Decided(self._kernel.now(), fleet.role, arrival, decision))
        lease = fleet.ledger.lease(decision.worker, routed)
        fleet.workers[decision.worker].submit(task_of(arrival, partial(then, arrival, lease)))

    def _fail(self) -> None:
        self._failed += 1
        self.end_s = self._kernel.now()

    # --- workers that come and go ---

    def _fleet_of(self, worker: str) -> _Fleet:
        return self._prefill if worker in self._prefill.workers else self._decode

    def _lose(self, fleet: _Fleet, name: str) -> None:
        fleet.workers[name].lose()
        self._kernel.after(self._notice_s, Priority.CHANGE, self._notice, fleet, name)

    def _notice(self, fleet: _Fleet, name: str) -> None:
        if not fleet.workers[name].up:
            fleet.ledger.set_available(name, False)

    def _join(self, fleet: _Fleet, name: str) -> None:
        fleet.workers[name].revive()
        fleet.ledger.set_available(name, True)


def new_prefill_worker(kernel: Kernel, spec: ClusterSpec) -> PrefillWorker:
    """A prefill worker as the cluster has them."""
    new_cache = partial(PrefixCache, spec.cache_tokens, spec.block_tokens)
    return PrefillWorker(kernel, spec.prefill_time, spec.prefill_budget_tokens, new_cache)


def new_decode_worker(kernel: Kernel, spec: ClusterSpec, experts: Experts) -> DecodeWorker:
    """A decode worker as the cluster has them."""
    return DecodeWorker(kernel, spec.step_time, spec.handoff_time, spec.batch_requests, experts)


def task_of(arrival: Arrival, on_end: Callable[[Task, bool], None]) -> Task:
    """A request's part at one worker."""
    request = arrival.request
    prompt = request.prompt_hash or request.id  # without a hash, no prompt is like another
    return Task(arrival.position, prompt, request.prompt_tokens, request.output_tokens, on_end)
