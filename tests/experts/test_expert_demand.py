"""Load per expert from totals, and the placement that is suggested for it."""

import numpy as np
import pytest

from coterie.errors import InputError
from coterie.experts.monitor.demand import HALF_LIFE_S, Demand, imbalance, suggest
from coterie.experts.monitor.messages import Load
from expert_members import server

A, B = server("a", "01", "23", experts=4), server("b", "23", "01", experts=4)


def load(*tokens):
    return Load(tuple(map(tuple, tokens)))


def test_rates_are_means_in_which_what_is_old_counts_less():
    demand = Demand()
    demand.report(A, load([100, 0], [7, 7]), 0)
    assert demand.rate("a") == 0  # it is not known when that was
    demand.report(A, load([400, 0], [7, 67]), HALF_LIFE_S)
    assert demand.rates([A, B])[0].tolist() == [[5, 0, 0, 0], [0, 0, 0, 1]]  # half of 300 / 30 and of 60 / 30
    assert demand.rates([A, B])[1].sum() == 0
    demand.report(A, load([400, 0], [7, 67]), 2 * HALF_LIFE_S)
    assert demand.rate("a") == 3
    assert demand.load("a") == load([400, 0], [7, 67])


def test_a_lost_report_loses_nothing():
    once, twice = Demand(), Demand()
    for demand, times in ((once, (10,)), (twice, (5, 10))):
        demand.report(A, load([0, 0], [0, 0]), 0)
        for now in times:
            demand.report(A, load([60 * now, 0], [0, 0]), now)
    assert once.rate("a") == pytest.approx(twice.rate("a"))


def test_other_experts_begin_anew_and_servers_can_be_forgotten():
    demand = Demand()
    demand.report(A, load([9, 9], [9, 9]), 0)
    demand.report(server("a", "0", "2", experts=4), load([1], [1]), 1)
    assert demand.rate("a") == 0
    demand.forget_all_but({"b"})
    assert demand.load("a") is None


def test_a_load_that_is_not_of_the_servers_experts_or_falls_is_refused():
    demand = Demand()
    with pytest.raises(InputError, match="a: the load does not have one number for each of its experts"):
        demand.report(A, load([1], [1, 1]), 0)
    demand.report(A, load([1, 1], [1, 1]), 0)
    with pytest.raises(InputError, match="a: the load fell"):
        demand.report(A, load([1, 0], [1, 1]), 1)


def test_imbalance_is_the_busiest_over_the_mean_server():
    assert imbalance(np.array([[30.0, 10], [10, 10]])) == pytest.approx((30 + 10) / 30)
    assert imbalance(np.ones((3, 2))) == 1
    assert imbalance(np.zeros((2, 2))) is None


def test_a_suggestion_keeps_the_servers_sizes_and_evens_their_load():
    rates = np.zeros((2, 2, 4))
    rates[0, 0, :2] = 40, 40  # layer 0: all of the load is a's
    rates[0, 1, 2:] = 10, 10
    rates[1, 1, :2] = 10, 10
    suggestion = suggest([A, B], rates)
    assert suggestion.imbalance == pytest.approx((80 + 20) / 60)
    assert suggestion.suggested == pytest.approx(1)
    for layer in range(2):
        sizes = [len(held[layer]) for held in suggestion.held.values()]
        assert sizes == [2, 2]
        assert sorted(suggestion.held["a"][layer] + suggestion.held["b"][layer]) == [0, 1, 2, 3]
    assert not set(suggestion.held["a"][0]) >= {0, 1}


def test_without_load_there_is_no_suggestion():
    with pytest.raises(InputError, match="no server that serves has had any load"):
        suggest([A, B], np.zeros((2, 2, 4)))
