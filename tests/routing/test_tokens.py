import numpy as np
import pytest

from coterie.clock import ManualClock
from coterie.core import RouteRequest, Served, WorkerState
from coterie.routing import Ledger, make_policy, route
from coterie.routing.tokens import FIRST_STEP_S

TARGETS = [WorkerState("a", "a"), WorkerState("b", "b")]


class Story:
    """A ledger, its clock, and the policy that follows it."""

    def __init__(self):
        self.clock = ManualClock()
        self.ledger = Ledger(TARGETS, self.clock)
        self.policy = make_policy("least_tokens", TARGETS)
        self.ledger.follow(self.policy)

    def lease(self, worker, tokens):
        return self.ledger.lease(worker, RouteRequest("r", output_tokens=tokens))

    def decide(self, tokens):
        request = RouteRequest("new", output_tokens=tokens)
        return route(self.policy, request, self.ledger.states(), np.random.default_rng(0))


def test_tokens_together_are_the_shorter_of_what_two_have_left():
    story = Story()
    story.lease("a", 100)
    for _ in range(3):
        story.lease("b", 10)
    assert story.decide(1000).worker == "b"  # 3 x 10 tokens together, not 100
    assert dict(story.decide(1000).scores) == {"a": -100, "b": -30}
    assert story.decide(5).worker == "a"  # 5 tokens together, not 3 x 5
    assert dict(story.decide(5).scores) == {"a": -5, "b": -15}


def test_what_was_decoded_since_no_longer_counts():
    story = Story()
    story.lease("a", 100)
    story.clock.advance(60 * FIRST_STEP_S)
    story.lease("b", 50)
    assert dict(story.decide(1000).scores) == {"a": pytest.approx(-40), "b": -50}


def test_the_step_time_is_that_of_requests_that_were_served():
    story = Story()
    lease = story.lease("b", 11)
    story.lease("a", 100)
    story.clock.advance(1.0)
    lease.release(Served(11, 0.5))  # 50 ms a token, so 20 of the other's are over
    assert dict(story.decide(1000).scores) == {"a": pytest.approx(-80), "b": 0}


def test_a_request_beyond_its_limit_has_one_token_left():
    story = Story()
    story.lease("a", 10)
    story.clock.advance(100.0)
    story.lease("b", 1).release()
    assert dict(story.decide(9).scores) == {"a": -1, "b": 0}


def test_ties_go_to_the_fewest_requests_and_then_to_the_least_recently_assigned():
    story = Story()
    assert story.decide(4).worker == "a"
    story.lease("a", 10)
    for _ in range(2):
        story.lease("b", 5)
    assert story.decide(100).worker == "a"
    story.lease("a", 5).release()
    story.lease("b", 5).release()
    assert story.decide(100).worker == "a"


def test_many_requests_come_and_go_and_nothing_is_left():
    story, rng, leases = Story(), np.random.default_rng(0), []
    for _ in range(400):
        if leases and rng.random() < 0.4:
            leases.pop(int(rng.integers(len(leases)))).release()
        else:
            leases.append(story.lease("ab"[int(rng.integers(2))], int(rng.integers(1, 50))))
        held = {name: sum(min(r.output_tokens, 30) for r in story.ledger.held(name)) for name in "ab"}
        assert dict(story.decide(30).scores) == {name: -tokens for name, tokens in held.items()}
    for lease in leases:
        lease.release()
    assert dict(story.decide(30).scores) == {"a": 0, "b": 0}
