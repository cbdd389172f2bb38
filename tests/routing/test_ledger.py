import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coterie.clock import ManualClock
from coterie.core import RouteRequest, Served, WorkerState
from coterie.errors import InputError
from coterie.routing import Lease, LeaseTotals, Ledger

A, B = WorkerState("a", "a"), WorkerState("b", "b")


def request(name="r", prompt_tokens=10, output_tokens=5):
    return RouteRequest(name, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def test_a_lease_counts_its_request_and_its_tokens():
    ledger = Ledger([A, B])
    ledger.lease("b", request())
    assert ledger.states() == (A, WorkerState("b", "b", requests=1, tokens=15, assigned=1))


def test_a_release_takes_effect_once_however_often_it_is_called():
    ledger = Ledger([A])
    other, lease = ledger.lease("a", request()), ledger.lease("a", request())
    assert lease.held
    for _ in range(3):
        lease.release()
    assert not lease.held
    assert other.held
    assert ledger.states() == (WorkerState("a", "a", requests=1, tokens=15, assigned=2),)
    assert ledger.totals() == {"a": LeaseTotals(given=2, released=1)}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_leaving_the_block_by_any_error_releases(error):
    ledger = Ledger([A])
    with pytest.raises(error), ledger.lease("a", request()):
        raise error
    assert ledger.states()[0].requests == 0


def test_releasing_inside_the_block_is_not_doubled_by_leaving_it():
    ledger = Ledger([A])
    with ledger.lease("a", request()) as lease:
        lease.release()
        ledger.lease("a", request())
    assert ledger.states()[0].requests == 1


def test_the_requests_a_worker_holds_are_told_oldest_first():
    ledger = Ledger([A, B])
    leases = [ledger.lease("a", request(name)) for name in "xyz"]
    ledger.lease("b", request("w"))
    leases[1].release()
    assert [held.id for held in ledger.held("a")] == ["x", "z"]


def test_states_are_a_snapshot():
    ledger = Ledger([A])
    before = ledger.states()
    ledger.lease("a", request())
    assert before == (A,)


def test_an_unavailable_worker_keeps_what_it_holds_until_released():
    ledger = Ledger([A])
    lease = ledger.lease("a", request())
    ledger.set_available("a", False)
    assert ledger.states() == (WorkerState("a", "a", available=False, requests=1, tokens=15, assigned=1),)
    lease.release()
    ledger.set_available("a", True)
    assert ledger.states() == (WorkerState("a", "a", assigned=1),)


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        ([], "no workers"),
        ([A, B, A], "two workers are named 'a'"),
        ([WorkerState("a", "a", requests=1)], "worker a starts with requests that no lease will release"),
    ],
)
def test_bad_targets_are_refused(targets, problem):
    with pytest.raises(InputError, match=problem):
        Ledger(targets)


def test_an_unknown_worker_is_named_and_nothing_changes():
    ledger = Ledger([A, B])
    for call in (
        lambda: ledger.lease("c", request()),
        lambda: ledger.held("c"),
        lambda: ledger.set_available("c", True),
    ):
        with pytest.raises(InputError, match="no worker is named 'c'; there are a, b"):
            call()
    assert ledger.states() == (A, B)


class Traffic(RuleBasedStateMachine):
    """Any interleaving of leases, releases (also doubled) and outages."""

    @initialize(workers=st.integers(1, 4))
    def start(self, workers):
        self.names = [f"w{i}" for i in range(workers)]
        self.ledger = Ledger([WorkerState(name, name) for name in self.names])
        self.leases, self.held = [], {name: [] for name in self.names}

    @rule(data=st.data(), prompt=st.integers(0, 1000), output=st.integers(0, 1000))
    def lease(self, data, prompt, output):
        name = data.draw(st.sampled_from(self.names))
        lease = self.ledger.lease(name, request(str(len(self.leases)), prompt, output))
        self.leases.append(lease)
        self.held[name].append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_any_even_if_already_released(self, data):
        lease = data.draw(st.sampled_from(self.leases))
        lease.release()
        if lease in self.held[lease.worker]:
            self.held[lease.worker].remove(lease)

    @rule(data=st.data(), available=st.booleans())
    def change_availability(self, data, available):
        self.ledger.set_available(data.draw(st.sampled_from(self.names)), available)

    @invariant()
    def load_is_the_sum_of_the_leases_held(self):
        totals = self.ledger.totals()
        for state in self.ledger.states():
            held = self.held[state.name]
            assert state.requests == len(held)
            assert state.tokens == sum(lease.request.prompt_tokens + lease.request.output_tokens for lease in held)
            assert self.ledger.held(state.name) == tuple(lease.request for lease in held)
            assert totals[state.name].given - totals[state.name].released == state.requests
        assert sum(total.given for total in totals.values()) == len(self.leases)

    def teardown(self):
        for lease in getattr(self, "leases", []):
            lease.release()
        if hasattr(self, "ledger"):
            assert all(state.requests == state.tokens == 0 for state in self.ledger.states())


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=25)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=20))
def test_sequence_numbers_grow_over_all_workers(names):
    ledger = Ledger([A, B])
    for n, name in enumerate(names, start=1):
        ledger.lease(name, request()).release()
        assert {state.name: state.assigned for state in ledger.states()}[name] == n


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, float]] = []

    def leased(self, lease: Lease, now_s: float) -> None:
        self.told.append(("leased", lease.worker, lease.request.id, now_s))

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        self.told.append((f"released {served.tokens if served else None}", lease.worker, lease.request.id, now_s))


def test_a_watcher_is_told_of_every_lease_once_and_of_its_end_once_with_the_ledgers_clock():
    clock, notes = ManualClock(), Notes()
    ledger = Ledger([A, B], clock)
    ledger.follow(notes)
    first = ledger.lease("a", RouteRequest("1"))
    clock.advance(2)
    with ledger.lease("b", RouteRequest("2")):
        clock.advance(1)
    first.release(Served(3, 0.5))
    first.release()
    assert notes.told == [
        ("leased", "a", "1", 0),
        ("leased", "b", "2", 2),
        ("released None", "b", "2", 3),
        ("released 3", "a", "1", 3),
    ]


def test_a_watcher_that_comes_late_is_told_of_what_is_held_in_the_order_of_assignment_and_the_one_before_no_more():
    ledger, before, after = Ledger([A, B], ManualClock()), Notes(), Notes()
    ledger.follow(before)
    leases = [ledger.lease(name, RouteRequest(name + str(i))) for i, name in enumerate("bab")]
    leases[0].release()
    ledger.follow(after)
    leases[1].release()
    assert after.told == [("leased", "a", "a1", 0), ("leased", "b", "b2", 0), ("released None", "a", "a1", 0)]
    assert len(before.told) == 4
    ledger.follow(object())
    leases[2].release()
    assert len(after.told) == 3


def test_served_says_the_mean_time_between_two_tokens():
    assert Served(5, 2.0).step_s == 0.5
    assert Served(1, 0.0).step_s is None
    for tokens, seconds in ((0, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(InputError, match="served"):
            Served(tokens, seconds)
