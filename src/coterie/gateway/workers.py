"""The workers of each role: who they are, whether they can be used, and how one is chosen."""

from __future__ import annotations

from coterie.clock import Clock
from coterie.core import Decision, Role, RouteRequest, WorkerState
from coterie.gateway.access import NO_ACCESS, Access
from coterie.gateway.config import GatewayConfig
from coterie.gateway.pool import Pool
from coterie.gateway.seat import Seat
from coterie.routing import Filter, KvHeadroom, Ledger, Policy, no_queue, random_stream, route


class Worker:
    """One prefill or decode server.

    Attributes:
        name: unique name, such as "decode-0"; what clients may see.
        role: "prefill" or "decode".
        url: where it is; what clients may not see.
        pool: its connections.
        problem: why it cannot be used; None if it can.
    """

    __slots__ = ("name", "pool", "problem", "role", "url")

    def __init__(self, name: str, role: Role, url: str, config: GatewayConfig, access: Access) -> None:
        self.name = name
        self.role = role
        self.url = url
        self.pool = Pool(
            f"{role} worker {name}",
            url,
            access.worker_headers,
            connect_timeout_s=config.connect_timeout_s,
            keep_idle_s=config.keep_idle_s,
        )
        self.problem: str | None = "not yet checked"


class Fleet:
    """The workers of one role, with the ledger of what each holds and the policy that chooses among them.

    Attributes:
        role: "prefill" or "decode".
        workers: by name.
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
        self.workers = {f"{role}-{i}": Worker(f"{role}-{i}", role, url, config, access) for i, url in enumerate(urls)}
        self.targets = [WorkerState(name=name, group=name, available=False) for name in self.workers]
        self.ledger = Ledger(
            self.targets,
            clock,
            sessions=config.keep_sessions if role == "decode" else 0,
            others=None if seat is None else seat.others(role, lambda name: self.workers[name].url),
        )
        self._policy: Policy | None = None
        self._rng = random_stream(config.seed, role, process=0 if seat is None else seat.process)
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from now on, but for who the workers are."""
        self._filters = _filters(config) if self.role == "decode" else ()
        for worker in self.workers.values():
            worker.pool.connect_timeout_s = config.connect_timeout_s
            worker.pool.keep_idle_s = config.keep_idle_s

    @property
    def policy(self) -> Policy | None:
        """How a worker is chosen; set once the profile is known to fit, see `startup`.  The ledger follows it."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self.ledger.follow(policy)

    def choose(self, request: RouteRequest) -> tuple[Worker, Decision]:
        """Choose an available worker.

        Raises:
            NoWorkerError: none is available.
        """
        assert self.policy is not None
        recalled = self.ledger.recall(request)
        decision = route(self.policy, recalled, self.ledger.states(), self._rng, self._filters)
        return self.workers[decision.worker], decision

    def available(self) -> list[Worker]:
        """The workers that can be used now."""
        return [worker for worker in self.workers.values() if worker.problem is None]

    def set_problem(self, worker: Worker, problem: str | None) -> None:
        """Take a worker out for a reason, or back in with None."""
        worker.problem = problem
        self.ledger.set_available(worker.name, problem is None)


def _filters(config: GatewayConfig) -> tuple[Filter, ...]:
    headroom = () if config.kv_limit is None else (KvHeadroom(config.kv_limit),)
    return (*headroom, no_queue) if config.pass_over_queues else headroom
