from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coterie.core import RouteRequest, WorkerState
from coterie.errors import NoWorkerError
from coterie.routing import LeastLoad, Ledger, PowerOfTwo, Random, RoundRobin, route

REQUEST = RouteRequest("r")


def workers(*requests):
    return [WorkerState(name, name, requests=n) for name, n in zip("abcdefgh", requests, strict=False)]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def replay(policy, names, rng, requests):
    """Workers chosen one after another, none released."""
    ledger = Ledger([WorkerState(name, name) for name in names])
    chosen = []
    for _ in range(requests):
        chosen.append(route(policy, REQUEST, ledger.states(), rng).worker)
        ledger.lease(chosen[-1], REQUEST)
    return chosen


def test_round_robin_takes_each_in_turn(rng):
    assert "".join(replay(RoundRobin(), "abc", rng, 7)) == "abcabca"


def test_round_robin_ignores_load(rng):
    busy, idle = WorkerState("a", "a", requests=99, assigned=1), WorkerState("b", "b", assigned=2)
    assert RoundRobin().choose(REQUEST, [busy, idle], rng).worker == "a"


def test_round_robin_gives_the_next_request_to_a_worker_that_was_away(rng):
    ledger = Ledger([WorkerState(name, name) for name in "abc"])
    ledger.set_available("b", False)
    chosen = ""
    for n in range(6):
        if n == 3:
            ledger.set_available("b", True)
        chosen += route(RoundRobin(), REQUEST, ledger.states(), rng).worker
        ledger.lease(chosen[-1], REQUEST)
    assert chosen == "acabca"


def test_least_load_takes_the_fewest_requests(rng):
    decision = LeastLoad().choose(REQUEST, workers(3, 1, 2), rng)
    assert (decision.worker, decision.reason) == ("b", "least load")


def test_least_load_uses_an_idle_pool_evenly(rng):
    ledger = Ledger([WorkerState(name, name) for name in "abc"])
    chosen = ""
    for _ in range(6):  # each request ends before the next one comes
        chosen += route(LeastLoad(), REQUEST, ledger.states(), rng).worker
        ledger.lease(chosen[-1], REQUEST).release()
    assert chosen == "abcabc"


def test_least_load_says_what_it_stands_in_for(rng):
    assert LeastLoad("load only: because").choose(REQUEST, workers(0), rng).reason == "load only: because"


def test_random_draws_all_workers_alike(rng):
    drawn = Counter(Random().choose(REQUEST, workers(9, 0, 5), rng).worker for _ in range(3000))
    assert all(abs(drawn[name] - 1000) < 130 for name in "abc")  # 5 standard deviations of 26


def test_power_of_two_draws_all_pairs_alike_and_takes_the_less_loaded(rng):
    pool = workers(0, 1, 2, 3)
    decisions = [PowerOfTwo().choose(REQUEST, pool, rng) for _ in range(6000)]
    pairs = Counter(frozenset(decision.candidates) for decision in decisions)
    assert len(pairs) == 6
    assert all(abs(count - 1000) < 145 for count in pairs.values())  # 5 standard deviations of 29
    assert all(decision.worker == min(decision.candidates) for decision in decisions)  # loads rise with the names


def test_power_of_two_takes_a_single_worker(rng):
    assert PowerOfTwo().choose(REQUEST, workers(7), rng).worker == "a"


@pytest.mark.parametrize("policy", [RoundRobin(), Random(), LeastLoad(), PowerOfTwo()])
def test_a_seed_fixes_all_choices(policy):
    one, two = (replay(policy, "abcde", np.random.default_rng(5), 40) for _ in range(2))
    assert one == two


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_unavailable_workers_are_never_chosen(available, seed):
    pool = [replace(worker, available=on) for worker, on in zip(workers(0, 0, 0, 0, 0), available, strict=False)]
    for policy in (RoundRobin(), Random(), LeastLoad(), PowerOfTwo()):
        if any(available):
            chosen = route(policy, REQUEST, pool, np.random.default_rng(seed)).worker
            assert chosen in {worker.name for worker in pool if worker.available}
        else:
            with pytest.raises(NoWorkerError, match="no worker is available"):
                route(policy, REQUEST, pool, np.random.default_rng(seed))
