"""Workers that come and go while requests are held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bare_profiles import bare_profile
from coterie.clock import ManualClock
from coterie.core import ExpertCounts, ModelGeometry, Reading, RouteRequest, WorkerState
from coterie.errors import InputError
from coterie.routing import Ledger, make_policy, route
from coterie.routing.shared_load import Board
from coterie.signature import SignatureTransform

GEOMETRY = ModelGeometry(layers=1, experts=8, top_k=1)
TRANSFORM = SignatureTransform(GEOMETRY, (0,), idf=np.ones((1, 8), np.float32))
PROFILE = bare_profile(TRANSFORM, np.eye(8, dtype=np.float32)[:3])
NAMES = "abcde"


def targets(names):
    return [WorkerState(name, name) for name in names]


def asking(expert, name="r", tokens=4):
    counts = np.zeros((1, 8), np.uint8)
    counts[0, expert] = tokens
    return RouteRequest(name, tokens, counts=ExpertCounts(GEOMETRY, counts, tokens, tokens))


class Told:
    """A watcher that knows what is held, and refuses to be told twice or of the unknown."""

    def __init__(self, names):
        self.names = names
        self.held = []

    def leased(self, lease, now_s):
        assert lease.worker in self.names
        assert lease not in self.held
        assert all(lease.sequence > other.sequence for other in self.held)
        self.held.append(lease)

    def released(self, lease, served, now_s):
        self.held.remove(lease)


class Changes(RuleBasedStateMachine):
    """Any interleaving of leases, releases, outages and changes of the pool, under one of three watchers."""

    @initialize(kind=st.sampled_from(["told", "marginal", "locality_refit"]), names=st.permutations(NAMES))
    def start(self, kind, names):
        self.kind, self.names, self.clock = kind, names[:2], ManualClock()
        self.ledger = Ledger(targets(self.names), self.clock)
        self.policy = self.made(self.names)
        self.ledger.follow(self.policy)
        self.held, self.leaving, self.given = [], [], 0

    def made(self, names):
        return Told(names) if self.kind == "told" else make_policy(self.kind, targets(names), profile=PROFILE)

    @rule(data=st.data(), expert=st.integers(0, 7))
    def lease(self, data, expert):
        name = data.draw(st.sampled_from([*self.names, *self.leaving]))
        self.held.append(self.ledger.lease(name, asking(expert, str(self.given))))
        self.given += 1
        assert self.held[-1].sequence == self.given

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        lease = data.draw(st.sampled_from(self.held))
        self.held.remove(lease)
        lease.release()

    @rule(data=st.data(), available=st.booleans())
    def change_availability(self, data, available):
        self.ledger.set_available(data.draw(st.sampled_from(self.names)), available)

    @rule(names=st.permutations(NAMES), count=st.integers(1, len(NAMES)))
    def change_the_workers(self, names, count):
        here = {state.name for state in self.ledger.states()}
        self.names = names[:count]
        self.leaving = sorted(here - set(self.names))
        self.policy = self.made(self.names)
        self.ledger.retarget(targets(self.names), self.policy)
        if self.kind == "locality_refit":
            assert len(self.policy._window) == len(self.held_by_targets())

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def forget(self, data):
        name = data.draw(st.sampled_from(self.leaving))
        if any(lease.worker == name for lease in self.held):
            with pytest.raises(InputError, match="holds"):
                self.ledger.forget(name)
        else:
            self.ledger.forget(name)
            self.leaving.remove(name)

    @rule(expert=st.integers(0, 7), step_s=st.floats(0, 3))
    def go_on(self, expert, step_s):
        self.clock.advance(step_s)
        if any(state.available for state in self.ledger.states()) and self.kind != "told":
            chosen = route(self.policy, asking(expert), self.ledger.states(), np.random.default_rng(0))
            assert chosen.worker in self.names
        if self.kind == "locality_refit" and (job := self.policy.due(self.ledger.states(), self.clock.now())):
            self.policy.install(job.run(), self.clock.now())

    def held_by_targets(self):
        return [lease for lease in self.held if lease.worker in self.names]

    @invariant()
    def load_is_the_sum_of_the_leases_held(self):
        states = self.ledger.states()
        assert [state.name for state in states[: len(self.names)]] == self.names
        assert sorted(state.name for state in states[len(self.names) :]) == self.leaving
        assert not any(state.available for state in states if state.name in self.leaving)
        for state in states:
            held = [lease.request for lease in self.held if lease.worker == state.name]
            assert (state.requests, state.tokens) == (len(held), 4 * len(held))
            assert self.ledger.held(state.name) == tuple(held)
            totals = self.ledger.totals()[state.name]
            assert totals.given - totals.released == state.requests

    @invariant()
    def the_policy_knows_what_a_new_one_told_of_all_that_is_held_would_know(self):
        if self.kind == "told":
            assert self.policy.held == self.held_by_targets()
        if self.kind == "marginal" and self.policy._pool is not None:
            self.compare_batches()

    def compare_batches(self):
        ledger = Ledger(targets(self.names), self.clock)
        fresh = self.made(self.names)
        ledger.follow(fresh)
        for lease in self.held_by_targets():
            ledger.lease(lease.worker, lease.request)
        batches = self.policy._pool.batches
        if fresh._pool is None:
            assert not any(batches.requests)
            assert not batches._batches.sums.any()
            return
        assert batches.requests == fresh._pool.batches.requests
        assert (batches._batches.sums == fresh._pool.batches._batches.sums).all()
        assert batches.active == fresh._pool.batches.active

    def teardown(self):
        for lease in getattr(self, "held", []):
            lease.release()
        if hasattr(self, "ledger"):
            assert all(state.requests == state.tokens == 0 for state in self.ledger.states())


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_what_is_known_of_a_worker_that_stays_stays_with_it_wherever_it_stands():
    clock = ManualClock()
    ledger = Ledger(targets("ab"), clock)
    ledger.lease("b", asking(1))
    ledger.observe("b", Reading(0.5, 2), good_for_s=3)
    ledger.retarget(targets("cb"), None)
    clock.advance(2)
    states = {state.name: state for state in ledger.states()}
    assert (states["b"].requests, states["b"].assigned, states["b"].reading) == (1, 1, Reading(0.5, 2))
    assert states["c"] == WorkerState("c", "c")
    clock.advance(2)
    assert ledger.states()[1].reading is None


def test_one_that_comes_back_before_it_was_forgotten_holds_what_it_held():
    ledger, told = Ledger(targets("ab")), Told("ab")
    lease = ledger.lease("a", asking(1))
    ledger.retarget(targets("b"), Told("b"))
    ledger.retarget(targets("ab"), told)
    assert told.held == [lease]
    lease.release()
    assert not told.held


@pytest.mark.parametrize(("names", "problem"), [("", "no workers"), ("aa", "two workers are named 'a'")])
def test_bad_targets_change_nothing(names, problem):
    ledger = Ledger(targets("ab"))
    with pytest.raises(InputError, match=problem):
        ledger.retarget(targets(names), None)
    assert [state.name for state in ledger.states()] == ["a", "b"]


def test_a_target_cannot_be_forgotten():
    with pytest.raises(InputError, match="worker a is a target"):
        Ledger(targets("ab")).forget("a")


def test_ledgers_that_share_load_still_agree_when_one_has_changed_its_workers():
    shared = Board(bytearray(Board.size(2)), 2)
    one, other = (Ledger(targets("ab"), others=shared.row(1, row)) for row in range(2))
    leases = [one.lease("a", asking(0)), other.lease("a", asking(0)), other.lease("b", asking(0))]
    one.retarget(targets("cb"), None)
    assert [(state.name, state.requests) for state in one.states()] == [("c", 0), ("b", 1), ("a", 2)]
    assert [state.requests for state in other.states()] == [2, 1]
    leases[0].release()
    assert [state.requests for state in other.states()] == [1, 1]
    one.forget("a")
    one.lease("b", asking(0))
    assert [state.requests for state in other.states()] == [1, 2]
    assert [state.requests for state in one.states()] == [0, 2]
