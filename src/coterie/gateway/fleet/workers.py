"""The workers of each role: who they are, whether they can be used, and how one is chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import Literal

from coterie.clock import Clock
from coterie.core import Decision, Role, RouteRequest, WorkerState
from coterie.errors import ConfigError, NoWorkerError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import NO_ACCESS, Access
from coterie.gateway.fleet.breaker import Breaker, BreakerRules
from coterie.gateway.legs.pool import Pool
from coterie.gateway.processes.seat import Seat
from coterie.gateway.urls import plain_url, split_url
from coterie.routing import Filter, KvHeadroom, Ledger, Policy, Sharing, no_queue, random_stream, route
from coterie.routing.shared_load import MOST_WORKERS

RETRY_AFTER_S = 3
"""When to ask again after workers whom health checks have taken out."""

Reason = Literal["unhealthy", "breaker open", "draining", "removed"]
"""Why a worker is not used.  Each holds for itself: a worker is used when none does."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How a decode worker comes by the KV of prompts.

    Attributes:
        fetches: whether it has fetched some from a prefill worker; None where it does not show that.
        on_lost: what it does when it cannot: "fail" or "recompute"; None where it does not show that.
    """

    fetches: bool | None = None
    on_lost: str | None = None


_COMES_BY_KV = {
    True: "fetches KV from prefill workers",
    False: "computes prompts itself",
    None: "does not show whether it fetches KV",
}


class Worker:
    """One prefill or decode server.

    Attributes:
        name: unique name, such as "decode-0"; what clients may see.  A worker at another URL never has it.
        role: "prefill" or "decode".
        url: where it is; what clients may not see.
        pool: its connections.
        breaker: keeps requests from it while it fails them.
        problems: what keeps it from being used, in words, by reason; `Fleet.set_problem` writes it.
        met: names of the workers of the other role that it has exchanged KV with since it joined.
        alarm: set when its health is to be looked at before the next check is due.
        transfer: how a decode worker comes by KV, as far as it has shown.
    """

    __slots__ = ("alarm", "breaker", "identity", "met", "name", "pool", "problems", "role", "transfer", "url")

    def __init__(self, name: str, role: Role, url: str, config: GatewayConfig, access: Access) -> None:
        self.name = name
        self.role = role
        self.url = url
        self.identity = plain_url(url)
        self.pool = Pool(
            f"{role} worker {name}",
            url,
            access.worker_headers,
            config.worker_ca,
            connect_timeout_s=config.connect_timeout_s,
            keep_idle_s=config.keep_idle_s,
        )
        self.breaker = Breaker(_breaker_rules(config))
        self.problems: dict[Reason, str] = {"unhealthy": "not yet checked"}
        self.met: set[str] = set()
        self.alarm = asyncio.Event()
        self.transfer = Transfer()

    @property
    def problem(self) -> str | None:
        """Why it cannot be used, in words; None if it can.  It may name the URL."""
        return "; ".join(self.problems.values()) or None

    @property
    def condition(self) -> str:
        """Whether it can be used, and how a decode worker comes by KV, in words."""
        if self.problem is not None:
            return self.problem
        return f"available, {_COMES_BY_KV[self.transfer.fetches]}" if self.role == "decode" else "available"

    def begin_anew(self) -> None:
        """What was known of how well it is no longer counts: it is looked at now, and probed before it is used."""
        self.breaker = Breaker(self.breaker.rules)
        self.problems = {"unhealthy": "not yet checked"}
        self.alarm.set()


class Fleet:
    """The workers of one role, with the ledger of what each holds and the policy that chooses among them.

    Attributes:
        role: "prefill" or "decode".
        workers: by name, with those that were removed and still have requests.
        targets: the workers without those, in the order of the configuration.
        urls: of all workers that there ever were, by name.
        ledger: who holds what.
        clock: the ledger's and the policy's.
    """

    def __init__(
        self,
        role: Role,
        urls: tuple[str, ...],
        config: GatewayConfig,
        clock: Clock,
        access: Access = NO_ACCESS,
        seat: Seat | None = None,
    ) -> None:
        self.role = role
        self.clock = clock
        self.workers: dict[str, Worker] = {}
        self.urls = _urls_of(role, {} if seat is None else seat.urls)
        self._access = access
        self._seat = seat
        self.targets: tuple[Worker, ...] = self.at(urls, config)
        self._place(self.targets)
        self.ledger = Ledger(
            states_of(self.targets),
            clock,
            sessions=config.keep_sessions if role == "decode" else 0,
            others=None if seat is None else seat.others(role, self._url_of),
        )
        self._policy: Policy | None = None
        self._rng = random_stream(config.seed, role, process=0 if seat is None else seat.process)
        self.configure(config)
        for worker in self.targets:
            if seat is not None and worker.name in seat.drained:
                self.drain(worker)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from now on, but for who the workers are."""
        self._filters = _filters(config) if self.role == "decode" else ()
        for worker in self.workers.values():
            worker.pool.connect_timeout_s = config.connect_timeout_s
            worker.pool.keep_idle_s = config.keep_idle_s
            worker.breaker.rules = _breaker_rules(config)

    @property
    def policy(self) -> Policy | None:
        """How a worker is chosen; set once the profile is known to fit, see `startup`.  The ledger follows it."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._share(policy)
        self._policy = policy
        self.ledger.follow(policy)

    def _share(self, policy: Policy) -> None:
        """Let a policy know of the requests of the gateway's other processes."""
        if self._seat is not None and isinstance(policy, Sharing):
            policy.share(self._seat.share(self._url_of))

    def choose(self, request: RouteRequest, avoid: Set[str] = frozenset()) -> tuple[Worker, Decision]:
        """Choose an available worker.

        Args:
            request: as the policy may know it.
            avoid: names of workers that are chosen only if no other is available.

        Raises:
            NoWorkerError: none is available.
        """
        assert self.policy is not None
        self.require()
        recalled = self.ledger.recall(request)
        states = self.ledger.states()
        if avoid:
            others = tuple(state for state in states if state.name not in avoid)
            states = others if any(state.available for state in others) else states
        decision = route(self.policy, recalled, states, self._rng, self._filters)
        return self.workers[decision.worker], decision

    def _url_of(self, name: str) -> str:
        return self.workers[name].identity

    def available(self) -> list[Worker]:
        """The workers that can be used now."""
        return [worker for worker in self.workers.values() if not worker.problems]

    def require(self) -> None:
        """Refuse what would need this fleet while nobody of it is available.

        Raises:
            NoWorkerError: with the reason for each worker, and when to ask again.
        """
        for worker in self.workers.values():
            if not worker.problems:
                return
        why = ", ".join(f"{worker.name}: {' and '.join(worker.problems)}" for worker in self.workers.values())
        raise NoWorkerError(f"no {self.role} worker is available ({why})", self._retry_after_s())

    def set_problem(self, worker: Worker, reason: Reason, problem: str | None) -> None:
        """Keep requests from a worker for a reason, told in words; or no longer for this reason, with None."""
        if problem is None:
            worker.problems.pop(reason, None)
        else:
            worker.problems[reason] = problem
        self.ledger.set_available(worker.name, not worker.problems)

    # --- who the workers are ---

    def at(self, urls: Sequence[str], config: GatewayConfig) -> tuple[Worker, ...]:
        """The workers at these URLs: those that are here, and new ones for the rest.  Nothing changes yet.

        Raises:
            ConfigError: a URL is none, or there were too many.
        """
        names = {split_url(url): name for name, url in self.urls.items()}
        for url in urls:
            names.setdefault(split_url(url), f"{self.role}-{len(names)}")
        if self._seat is not None and len(names) > MOST_WORKERS:
            raise ConfigError(
                f"{self.role}: more than {MOST_WORKERS} different workers since the start, which is all that processes "
                "can show each other; restart the gateway"
            )
        named = [(names[split_url(url)], url) for url in urls]
        return tuple(
            self.workers.get(name) or Worker(name, self.role, url, config, self._access) for name, url in named
        )

    def retarget(self, workers: Sequence[Worker], policy: Policy) -> None:
        """Let these be the workers from now on, chosen among by a policy made for them.

        Those that are taken out get no further request, and are kept until `forget`.  Those that come, or come back
        before that, are used once their health was checked and they were probed.
        """
        before, self.targets = self.targets, tuple(workers)
        self._place([*workers, *(worker for worker in self.workers.values() if worker not in workers)])
        self._share(policy)
        self.ledger.retarget(states_of(workers), policy)
        self._policy = policy
        for worker in before:
            if worker not in workers:
                self.set_problem(worker, "removed", "was removed, and ends what it has")
        for worker in workers:
            if worker not in before:
                worker.begin_anew()
                self.ledger.set_available(worker.name, False)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that was taken out and has nothing left to do."""
        self.ledger.forget(worker.name)
        del self.workers[worker.name]
        worker.pool.close()

    def _place(self, workers: Sequence[Worker]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.urls |= {worker.name: worker.url for worker in workers}

    # --- the breaker ---

    def failed(self, worker: Worker, problem: str, *, refused: bool = False) -> bool:
        """A request failed at a worker; return whether that opened its breaker.

        Args:
            worker: where.
            problem: what happened, in words.
            refused: whether it did not even take the connection.
        """
        opened = worker.breaker.failed(self.clock.now(), refused=refused)
        if opened:
            self.set_problem(worker, "breaker open", problem)
            worker.alarm.set()
        return opened

    def trial_over(self, worker: Worker, problem: str | None) -> None:
        """Say how the trial of an open breaker went; None for well."""
        worker.breaker.end_trial(self.clock.now(), well=problem is None)
        self.set_problem(worker, "breaker open", problem)

    # --- drain ---

    def drain(self, worker: Worker) -> None:
        """Send a worker no further request; those that it has run to their end."""
        self.set_problem(worker, "draining", "draining")

    def resume(self, worker: Worker) -> None:
        """Use a worker again that was to be drained."""
        self.set_problem(worker, "draining", None)

    def holds_nothing(self, worker: Worker) -> bool:
        """Whether no request of this gateway is at a worker."""
        return not self.ledger.held(worker.name)

    def _retry_after_s(self) -> int:
        """Whole seconds after which a worker may be back: when the first trial is due, else a guess."""
        due = [worker.breaker.until_s for worker in self.workers.values() if worker.breaker.state != "closed"]
        return max(1, ceil(min(due) - self.clock.now())) if due else RETRY_AFTER_S


def _urls_of(role: Role, urls: Mapping[str, str]) -> dict[str, str]:
    return {name: url for name, url in urls.items() if name.startswith(f"{role}-")}


def states_of(workers: Sequence[Worker]) -> list[WorkerState]:
    """The workers as targets of a policy: each is a group of its own, and holds nothing."""
    return [WorkerState(name=worker.name, group=worker.name, available=False) for worker in workers]


def _breaker_rules(config: GatewayConfig) -> BreakerRules:
    return BreakerRules(config.breaker_failures, config.breaker_open_s, config.breaker_most_open_s)


def _filters(config: GatewayConfig) -> tuple[Filter, ...]:
    headroom = () if config.kv_limit is None else (KvHeadroom(config.kv_limit),)
    return (*headroom, no_queue) if config.pass_over_queues else headroom
