import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.clock import ManualClock
from coterie.core import Reading, RouteRequest, WorkerState
from coterie.errors import ConfigError, InputError
from coterie.routing import KvHeadroom, LeastLoad, Ledger, RoundRobin, no_queue, route
from coterie.routing.filters import apply_filters

FILTERS = (KvHeadroom(0.9), no_queue)


def workers(*readings):
    return [
        WorkerState(f"d{i}", f"d{i}", requests=10 + i, reading=None if one is None else Reading(*one))
        for i, one in enumerate(readings)
    ]


def decide(states, filters=FILTERS, policy=None):
    return route(policy or LeastLoad(), RouteRequest("r"), states, np.random.default_rng(0), filters)


def test_a_full_worker_is_passed_over_though_it_has_the_fewest_requests():
    decision = decide(workers((0.95, 0), (0.9, 0), (0.1, 0)))
    assert decision.worker == "d1"  # 0.9 is not above 0.9
    assert decision.passed_over == (("d0", "KV cache is full"),)


def test_a_worker_with_a_queue_is_passed_over():
    decision = decide(workers((0.5, 1), (0.5, 2), (0.5, 0)))
    assert decision.worker == "d2"
    assert decision.passed_over == (("d0", "requests wait"), ("d1", "requests wait"))


def test_where_all_are_full_those_without_a_queue_are_left():
    decision = decide(workers((0.95, 3), (0.99, 0), (0.95, 0)))
    assert decision.worker == "d1"
    assert decision.passed_over == (("d0", "requests wait"),)


def test_where_all_are_full_and_have_queues_the_policy_chooses_from_all():
    decision = decide(workers((0.95, 3), (0.99, 1)))
    assert decision.worker == "d0"
    assert decision.passed_over == ()


def test_a_worker_that_said_nothing_is_not_passed_over():
    assert decide(workers(None, (0.1, 0))).worker == "d0"


def test_filters_compose_with_any_policy():
    assert decide(workers((0.99, 0), (0.1, 0)), policy=RoundRobin()).worker == "d1"


def test_without_filters_readings_do_not_matter():
    decision = decide(workers((1.0, 9), (0.1, 0)), filters=())
    assert (decision.worker, decision.passed_over) == ("d0", ())


def test_workers_are_not_passed_over_for_one_that_has_more_than_its_share_already():
    full, empty = Reading(0.95, 0), Reading(0.1, 0)
    for requests, expected in ((12, "d2"), (13, "d0")):  # bounds: 1.25 * 29 / 3 = 12.1, 1.25 * 30 / 3 = 12.5
        states = [
            WorkerState("d0", "d0", requests=8, reading=full),
            WorkerState("d1", "d1", requests=8, reading=full),
            WorkerState("d2", "d2", requests=requests, reading=empty),
        ]
        assert decide(states).worker == expected


@given(st.lists(st.none() | st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=6))
def test_some_worker_is_always_left_and_each_is_left_or_passed_over_once(readings):
    states = workers(*readings)
    kept, passed = apply_filters(FILTERS, states)
    assert kept
    assert sorted([worker.name for worker in kept] + [name for name, _ in passed]) == [one.name for one in states]


def test_what_a_worker_said_is_shown_until_it_is_too_old():
    clock = ManualClock()
    ledger = Ledger([WorkerState("d0", "d0")], clock)
    ledger.observe("d0", Reading(0.5, 1), good_for_s=3)
    lease = ledger.lease("d0", RouteRequest("r", output_tokens=7))
    clock.advance(2)
    assert ledger.states()[0].reading == Reading(0.5, 1)
    assert ledger.states()[0].tokens == 7
    ledger.observe("d0", Reading(0.6, 0), good_for_s=3)
    clock.advance(2)
    lease.release()
    assert ledger.states()[0].reading == Reading(0.6, 0)
    clock.advance(1)
    assert ledger.states()[0].reading is None


def test_a_reading_of_no_known_worker_is_refused():
    with pytest.raises(InputError, match="no worker is named 'd9'"):
        Ledger([WorkerState("d0", "d0")]).observe("d9", Reading(0.5, 0), 1.0)


@pytest.mark.parametrize("values", [(-0.1, 0), (1.1, 0), (float("nan"), 0), (0.5, -1)])
def test_readings_that_cannot_be_are_refused(values):
    with pytest.raises(InputError, match="reading"):
        Reading(*values)


@pytest.mark.parametrize("limit", [0, 1.01, -1, float("nan")])
def test_limits_that_cannot_be_are_refused(limit):
    with pytest.raises(ConfigError, match="limit of KV usage"):
        KvHeadroom(limit)
