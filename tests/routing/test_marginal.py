"""Marginal cost, on batches small enough to work out by hand."""

import numpy as np
import pytest

from coterie.core import ExpertCounts, ModelGeometry, RouteRequest, WorkerState
from coterie.routing import Ledger, make_policy, route

GEOMETRY = ModelGeometry(layers=1, experts=8, top_k=2)
RNG = np.random.default_rng(0)


def asking(*experts, tokens=4, geometry=GEOMETRY):
    """A request all of whose tokens chose the same experts."""
    counts = np.zeros((geometry.layers, geometry.experts), dtype=np.uint16)
    counts[:, list(experts)] = tokens
    return RouteRequest("r", counts=ExpertCounts(geometry, counts, tokens, tokens))


class Pool:
    """Workers under a ledger that the policy follows."""

    def __init__(self, workers, groups=None):
        names = [f"w{i}" for i in range(workers)]
        targets = [WorkerState(name, group) for name, group in zip(names, groups or names, strict=True)]
        self.policy = make_policy("marginal", targets)
        self.ledger = Ledger(targets)
        self.ledger.follow(self.policy)

    def hold(self, worker, *requests):
        return [self.ledger.lease(worker, request) for request in requests]

    def choose(self, request):
        return route(self.policy, request, self.ledger.states(), RNG)


def test_a_request_joins_those_that_use_its_experts():
    pool = Pool(2)
    pool.hold("w0", asking(0, 1), asking(0, 1))
    pool.hold("w1", asking(2, 3), asking(2, 3))
    assert pool.choose(asking(0, 1)).worker == "w0"
    assert pool.choose(asking(2, 3)).worker == "w1"


def test_no_likeness_fills_a_worker_beyond_the_bound():
    pool = Pool(2)
    pool.hold("w0", *[asking(0, 1)] * 7)
    pool.hold("w1", *[asking(2, 3)] * 2)
    # the mean is 4.5, and the bound 1.25 * 4.5 + 1 = 6.6
    decision = pool.choose(asking(0, 1))
    assert decision.candidates == ("w1",)
    assert decision.worker == "w1"


def test_requests_that_are_over_count_no_more():
    pool = Pool(2)
    leases = pool.hold("w0", asking(0, 1))
    pool.hold("w1", asking(2, 3))
    leases += pool.hold("w0", asking(2, 3))
    leases[0].release()
    # w0 now holds what w1 holds, and was assigned later
    assert pool.choose(asking(2, 3)).worker == "w1"


def test_the_first_request_goes_by_load_and_the_decision_says_so():
    pool = Pool(2)
    assert pool.choose(asking(0, 1)).reason == "load only: no counts"


@pytest.mark.parametrize("request_", [RouteRequest("r"), asking(5, geometry=ModelGeometry(2, 8, 1))])
def test_a_request_without_counts_that_can_be_read_is_taken_for_the_mean(request_):
    pool = Pool(2)
    pool.hold("w0", asking(0, 1))
    pool.hold("w1", asking(2, 3))
    pool.hold("w1", asking(2, 3))[0].release()
    # the mean is two thirds of {2, 3}: w1 adds less
    assert pool.choose(request_).worker == "w1"


def test_a_policy_that_takes_over_is_told_of_what_is_held():
    pool = Pool(2)
    pool.hold("w0", asking(0, 1))
    pool.hold("w1", asking(2, 3))
    pool.policy = make_policy("marginal", pool.ledger.states())
    pool.ledger.follow(pool.policy)
    assert pool.choose(asking(2, 3)).worker == "w1"


def test_ranks_of_a_group_share_its_experts_and_load_chooses_among_them():
    pool = Pool(4, groups=["a", "a", "b", "b"])
    pool.hold("w0", asking(0, 1))
    pool.hold("w3", asking(2, 3))
    assert pool.choose(asking(0, 1)).worker == "w1"
    assert pool.choose(asking(2, 3)).worker == "w2"
