import numpy as np
import pytest

from coterie.core import Reading, RouteRequest, WorkerState
from coterie.routing import KvHeadroom, Ledger, RoundRobin, route
from coterie.routing.bound import load_bound
from coterie.routing.sessions import same_worker


def ledger_of(workers, **options):
    return Ledger([WorkerState(name, name) for name in workers], **options)


def turn(ledger, session, filters=()):
    """One turn of a conversation, and the worker that it gets; it is over at once."""
    request = ledger.recall(RouteRequest("r", session=session))
    decision = route(RoundRobin(), request, ledger.states(), np.random.default_rng(0), filters)
    ledger.lease(decision.worker, request).release()
    return decision.worker, decision.reason


def test_a_conversation_stays_with_its_worker_and_others_do_not_notice():
    ledger = ledger_of("abc", sessions=10)
    assert turn(ledger, "s") == ("a", "round robin")
    assert turn(ledger, None) == ("b", "round robin")
    assert turn(ledger, "s") == ("a", "session")
    assert turn(ledger, "t") == ("c", "round robin")
    assert turn(ledger, "s") == ("a", "session")
    assert turn(ledger, "t") == ("c", "session")


def test_a_conversation_moves_when_its_worker_is_lost_and_stays_where_it_moved_to():
    ledger = ledger_of("ab", sessions=10)
    assert turn(ledger, "s")[0] == "a"
    ledger.set_available("a", False)
    assert turn(ledger, "s") == ("b", "round robin")
    ledger.set_available("a", True)
    assert turn(ledger, "s") == ("b", "session")


def test_a_conversation_moves_when_its_worker_is_passed_over():
    ledger = ledger_of("ab", sessions=10)
    assert turn(ledger, "s")[0] == "a"
    ledger.observe("a", Reading(0.95, 0), good_for_s=10)
    assert turn(ledger, "s", [KvHeadroom(0.9)]) == ("b", "round robin")


def test_a_conversation_moves_when_its_worker_has_more_than_its_share():
    workers = [WorkerState("a", "a", requests=4), WorkerState("b", "b", requests=1)]
    request = RouteRequest("r", holder="a")
    assert load_bound(workers) == 1.25 * 6 / 2 < 4
    assert same_worker(request, workers) is None
    workers[1] = WorkerState("b", "b", requests=2)
    assert load_bound(workers) == 1.25 * 7 / 2 > 4
    assert same_worker(request, workers).worker == "a"


def test_the_conversation_without_a_turn_for_longest_is_forgotten():
    ledger = ledger_of("ab", sessions=2)
    for session in ("s", "t", "s", "u"):
        turn(ledger, session)
    holders = [ledger.recall(RouteRequest("r", session=session)).holder for session in "stu"]
    assert holders[1] is None
    assert None not in (holders[0], holders[2])


@pytest.mark.parametrize("sessions", [{}, {"sessions": 0}])
def test_a_ledger_remembers_no_conversation_unless_it_is_told_to(sessions):
    ledger = ledger_of("ab", **sessions)
    assert [turn(ledger, "s")[0] for _ in range(3)] == ["a", "b", "a"]
