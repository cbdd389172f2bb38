"""The workers of each role: who they are, whether they can be used, and how one is chosen."""

from __future__ import annotations

from coterie.core import Decision, Role, RouteRequest, WorkerState
from coterie.gateway.config import GatewayConfig
from coterie.gateway.pool import Pool
from coterie.routing import Ledger, Policy, random_stream, route


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

    def __init__(self, name: str, role: Role, url: str, config: GatewayConfig) -> None:
        self.name = name
        self.role = role
        self.url = url
        self.pool = Pool(
            f"{role} worker {name}",
            url,
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
    """

    def __init__(self, role: Role, urls: tuple[str, ...], config: GatewayConfig) -> None:
        self.role = role
        self.workers = {f"{role}-{i}": Worker(f"{role}-{i}", role, url, config) for i, url in enumerate(urls)}
        self.targets = [WorkerState(name=name, group=name, available=False) for name in self.workers]
        self.ledger = Ledger(self.targets)
        self._policy: Policy | None = None
        self._rng = random_stream(config.seed, role)

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
        decision = route(self.policy, request, self.ledger.states(), self._rng)
        return self.workers[decision.worker], decision

    def available(self) -> list[Worker]:
        """The workers that can be used now."""
        return [worker for worker in self.workers.values() if worker.problem is None]

    def set_problem(self, worker: Worker, problem: str | None) -> None:
        """Take a worker out for a reason, or back in with None."""
        worker.problem = problem
        self.ledger.set_available(worker.name, problem is None)
