"""How good an assignment could be: the least mean TPOT of requests whose experts and times are known beforehand.

No policy can know what this looks at: the true experts of every output, and of requests yet to come.  It says how much
there is to gain from a better assignment, and so which part of it a policy reaches.

Time is frozen: a request decodes from a given moment to a given moment, however fast its worker is.  A batch whose
requests all decode together is the case of one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.clock import ManualClock
from coterie.core import RouteRequest, Served, WorkerState
from coterie.errors import InputError
from coterie.latency import StepTime
from coterie.routing import Lease, Ledger, Policy, route

Floats = npt.NDArray[np.float64]
Assignment = npt.NDArray[np.int64]
"""`[N]`: the worker of each request, from 0."""

_MOST = 1 - 1e-6  # probabilities are clipped here, so that a request's part can be divided out again
_GAIN = 1e-12  # relative; what is less is rounding


class Instance:
    """Requests with their times and experts, and the workers that are to share them.

        TPOT of request i = mean over its life of T(worker, t)
        T(worker, t)      = step_s(n, sum over (l, e) of 1 - product over its requests j at t of (1 - p[j, l, e]))

    Args:
        probabilities: `[N, L, E]` of an output token's choosing each expert, from 0 to 1; above 1 - 1e-6 they are taken
            for that.
        workers: number D of workers; all alike.
        step: their step time.
        begin_s: `[N]` when each request begins to decode; at the same time, if left out.
        end_s: `[N]` when each ends.

    Raises:
        InputError: shapes do not match, there is no request or worker, a probability or a time is out of range.
    """

    def __init__(
        self,
        probabilities: npt.NDArray[np.floating[Any]],
        workers: int,
        step: StepTime,
        *,
        begin_s: npt.ArrayLike | None = None,
        end_s: npt.ArrayLike | None = None,
    ) -> None:
        N = len(probabilities)
        begins = np.zeros(N) if begin_s is None else np.asarray(begin_s, dtype=np.float64)
        ends = begins + 1 if end_s is None else np.asarray(end_s, dtype=np.float64)
        _check(probabilities, workers, begins, ends)
        edges = np.unique(np.concatenate([begins, ends]))
        self.workers = workers
        self.base_s: Floats = np.array([step.step_s(requests, 0) for requests in range(N + 1)])
        self.expert_s = step.per_expert_s
        self.idle: Floats = 1 - np.minimum(probabilities.reshape(N, -1).astype(np.float64), _MOST)
        self.first = np.searchsorted(edges, begins)
        self.last = np.searchsorted(edges, ends)
        self.seconds: Floats = np.diff(edges)
        self.weight: Floats = 1 / (ends - begins)

    def __len__(self) -> int:
        return len(self.idle)

    @property
    def at_once(self) -> bool:
        """Whether all requests decode together: the case of one moment."""
        return len(self.seconds) == 1

    def mean_tpot_s(self, assignment: Sequence[int] | Assignment) -> float:
        """Mean TPOT of all requests in seconds, if each is served by the worker that it is assigned to."""
        return _State(self, np.asarray(assignment)).cost() / len(self)

    def tpot_s(self, assignment: Sequence[int] | Assignment) -> Floats:
        """`[N]` TPOT of each request in seconds."""
        state = _State(self, np.asarray(assignment))
        return np.array([state.tpot_s(i) for i in range(len(self))])

    def heaviest(self, assignment: Sequence[int] | Assignment) -> int:
        """The most requests that a worker holds at any moment."""
        return int(_State(self, np.asarray(assignment)).requests.max())


def _check(probabilities: npt.NDArray[np.floating[Any]], workers: int, begins: Floats, ends: Floats) -> None:
    if probabilities.ndim != 3 or not len(probabilities) or workers < 1:
        raise InputError(
            f"oracle: probabilities {probabilities.shape} on {workers} workers; need (N, L, E), N and D >= 1"
        )
    if not (probabilities.min() >= 0 and probabilities.max() <= 1):
        raise InputError("oracle: a probability of an expert is not from 0 to 1")
    if begins.shape != (len(probabilities),) or ends.shape != begins.shape:
        raise InputError(f"oracle: times {begins.shape} and {ends.shape} of {len(probabilities)} requests")
    if not (np.isfinite(begins).all() and np.isfinite(ends).all() and (begins < ends).all()):
        raise InputError("oracle: each request must end after it begins, at finite times")


class _State:
    """An assignment, with what each worker's cost is made of at each moment (T moments, D workers, F experts)."""

    def __init__(self, instance: Instance, places: Assignment) -> None:
        T, D = len(instance.seconds), instance.workers
        self._instance = instance
        self.places = np.full(len(instance), -1)
        self.idle = np.ones((T, D, instance.idle.shape[1]))
        self.requests = np.zeros((T, D), dtype=np.int64)
        self.weights = np.zeros((T, D))
        for i, place in enumerate(places.tolist()):
            if place >= 0:
                self.put(i, place)

    def put(self, i: int, worker: int) -> None:
        """Assign a request that has no worker."""
        alive = slice(self._instance.first[i], self._instance.last[i])
        self.places[i] = worker
        self.idle[alive, worker] *= self._instance.idle[i]
        self.requests[alive, worker] += 1
        self.weights[alive, worker] += self._instance.weight[i]

    def take(self, i: int) -> None:
        """Take a request from its worker; products are built anew, so that no rounding gathers."""
        worker = int(self.places[i])
        self.places[i] = -1
        self.idle[:, worker], self.requests[:, worker], self.weights[:, worker] = 1, 0, 0
        for j in np.flatnonzero(self.places == worker).tolist():
            self.put(j, worker)

    def cost(self) -> float:
        """Sum of the requests' TPOT in seconds."""
        return float(self._costs(self.requests, self.weights, self.idle.sum(axis=-1)) @ self._instance.seconds)

    def tpot_s(self, i: int) -> float:
        """TPOT of a request that has a worker."""
        alive, worker = slice(self._instance.first[i], self._instance.last[i]), int(self.places[i])
        requests, idle = self.requests[alive, worker], self.idle[alive, worker].sum(axis=-1)
        costs = self._costs(requests, np.ones(len(requests)), idle)
        return float(costs @ self._instance.seconds[alive] * self._instance.weight[i])

    def change(self, worker: int, *, leave: int | None = None, join: int | None = None, most: int) -> float:
        """What the cost grows by if a request leaves a worker and another joins it; infinite above `most` requests."""
        instance = self._instance
        involved = [i for i in (leave, join) if i is not None]
        span = slice(min(instance.first[i] for i in involved), max(instance.last[i] for i in involved))
        idle, requests, weights = self.idle[span, worker], self.requests[span, worker], self.weights[span, worker]
        after, number, weight = idle.copy(), requests.copy(), weights.copy()
        for i, sign in ((leave, -1), (join, +1)):
            if i is not None:
                alive = slice(instance.first[i] - span.start, instance.last[i] - span.start)
                after[alive] *= instance.idle[i] ** sign
                number[alive] += sign
                weight[alive] += sign * instance.weight[i]
        if number.max() > most:
            return np.inf
        change = self._costs(number, weight, after.sum(axis=-1)) - self._costs(requests, weights, idle.sum(axis=-1))
        return float(change @ instance.seconds[span])

    def _costs(self, requests: npt.NDArray[np.int64], weights: Floats, idle: Floats) -> Floats:
        """Cost of each moment; the workers, where there is an axis of them, are summed."""
        instance = self._instance
        costs = weights * (instance.base_s[requests] + instance.expert_s * (instance.idle.shape[1] - idle))
        summed: Floats = costs if costs.ndim == 1 else costs.sum(axis=1)
        return summed


def assign_by(
    policy: Policy, instance: Instance, requests: Sequence[RouteRequest], rng: np.random.Generator
) -> Assignment:
    """Let a policy assign the requests in the order in which they begin, each without knowing what comes.

    Those that have ended are released before, with the times that they would have had.

    Args:
        policy: chooses among workers `decode-0` and so on; one that keeps state must be new.
        instance: when the requests come and go.
        requests: `[N]`, as the policy sees them.
        rng: the policy's chance.
    """
    clock, state = ManualClock(), _State(instance, np.full(len(instance), -1))
    targets = [WorkerState(name := f"decode-{k}", name) for k in range(instance.workers)]
    place = {target.name: k for k, target in enumerate(targets)}
    ledger = Ledger(targets, clock)
    ledger.follow(policy)
    leases: dict[int, Lease] = {}
    edges_s = np.concatenate([[0.0], np.cumsum(instance.seconds)])
    for i in np.argsort(instance.first, kind="stable").tolist():
        over = sorted((j for j in leases if instance.last[j] <= instance.first[i]), key=lambda j: instance.last[j])
        for j in over:
            clock.advance(float(edges_s[instance.last[j]]) - clock.now())
            tokens = max(requests[j].output_tokens, 1)
            leases.pop(j).release(Served(tokens, state.tpot_s(j) * (tokens - 1)))
        clock.advance(float(edges_s[instance.first[i]]) - clock.now())
        chosen = route(policy, requests[i], ledger.states(), rng).worker
        leases[i] = ledger.lease(chosen, requests[i])
        state.put(i, place[chosen])
    return state.places


# --- the best that is found ------------------------------------------------------------------------------------------


def best_found(
    instance: Instance,
    most: int,
    *,
    starts: Sequence[Sequence[int] | Assignment] = (),
    rng: np.random.Generator,
    tries: int = 4,
) -> Assignment:
    """A good assignment: local search by moves and swaps, from several starts.

    It begins from the given starts, from the assignment that puts each request in turn where it adds least, and from
    `tries` random even ones; the best of what they lead to is returned.

    Args:
        instance: what is to be assigned.
        most: requests that a worker may hold at any moment.
        starts: assignments to begin from, such as those of policies; one above `most` is left out.
        rng: chance.
        tries: random starts.

    Raises:
        InputError: more requests are alive at a moment than `most` on each worker.
    """
    alive = int(_State(instance, np.zeros(len(instance), dtype=np.int64)).requests.max())
    if alive > most * instance.workers:
        raise InputError(f"oracle: {alive} requests at once on {instance.workers} workers of at most {most}")
    states = [_State(instance, np.asarray(start)) for start in starts]
    states = [state for state in states if state.requests.max() <= most]
    orders = [np.argsort(instance.first, kind="stable"), *(rng.permutation(len(instance)) for _ in range(tries))]
    states += [state for order in orders if (state := _greedy(instance, order, most)) is not None]
    if not states:
        raise InputError(f"oracle: found no assignment with at most {most} requests on a worker; allow more")
    for state in states:
        _improve(state, instance, most)
    return min(states, key=_State.cost).places


def one_by_one(instance: Instance, most: int) -> Assignment:
    """Each request in turn where it adds least: it knows the experts and ends of all that came, but not what will come.

    Args:
        instance: what is to be assigned.
        most: requests that a worker may hold at any moment.

    Raises:
        InputError: a request finds no worker.
    """
    state = _greedy(instance, np.argsort(instance.first, kind="stable"), most)
    if state is None:
        raise InputError(f"oracle: a request finds {most} on every worker; allow more")
    return state.places


def _greedy(instance: Instance, order: npt.NDArray[np.intp], most: int) -> _State | None:
    state = _State(instance, np.full(len(instance), -1))
    for i in order.tolist():
        changes = [state.change(k, join=i, most=most) for k in range(instance.workers)]
        if min(changes) == np.inf:
            return None
        state.put(i, int(np.argmin(changes)))
    return state


def _improve(state: _State, instance: Instance, most: int) -> None:
    """Move and swap until neither lowers the cost."""
    least = _GAIN * state.cost()
    while _move_all(state, instance, most, least) or _swap_all(state, instance, most, least):
        pass


def _move_all(state: _State, instance: Instance, most: int, least: float) -> bool:
    moved = False
    for i in range(len(instance)):
        here = int(state.places[i])
        left = state.change(here, leave=i, most=most)
        changes = [np.inf if k == here else left + state.change(k, join=i, most=most) for k in range(instance.workers)]
        if min(changes) < -least:
            state.take(i)
            state.put(i, int(np.argmin(changes)))
            moved = True
    return moved


def _swap_all(state: _State, instance: Instance, most: int, least: float) -> bool:
    swapped = False
    for i in range(len(instance)):
        for j in range(i):
            a, b = int(state.places[i]), int(state.places[j])
            apart = instance.last[i] <= instance.first[j] or instance.last[j] <= instance.first[i]
            if a == b or apart:
                continue
            change = state.change(a, leave=i, join=j, most=most) + state.change(b, leave=j, join=i, most=most)
            if change < -least:
                state.take(i)
                state.take(j)
                state.put(i, b)
                state.put(j, a)
                swapped = True
    return swapped
