from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.core import RouteRequest
from coterie.metrics import RequestTimeline
from coterie.sim.outcomes import Outcomes
from coterie.sim.pareto import domain_medians_ms, front


def test_medians_are_of_each_domain_of_which_requests_had_two_tokens():
    population = SimpleNamespace(requests=[RouteRequest("", domain=domain) for domain in ("en", "zh", None, "ru")])
    outcomes = Outcomes(0.0)
    for position, tpot_ms in ((0, 10), (1, 30), (0, 12), (0, 40), (2, 99)):
        outcomes.finish(RequestTimeline(0.0, 1.0, 1.0 + tpot_ms / 1000, 2), position)
    outcomes.finish(RequestTimeline(0.0, 1.0, 1.0, 1), 3)  # a single token has no time per token
    medians = domain_medians_ms(outcomes, population)
    assert {name: round(median, 6) for name, median in medians.items()} == {"en": 12.0, "zh": 30.0}


def test_the_front_is_what_nothing_else_is_better_than():
    figures = np.array([[1.0, 4.0], [2.0, 2.0], [4.0, 1.0], [2.0, 3.0], [2.0, 2.0]])
    assert front(figures).tolist() == [True, True, True, False, True]  # equals do not dominate one another


@given(arrays(np.int64, st.tuples(st.integers(1, 8), st.integers(1, 3)), elements=st.integers(0, 4)))
def test_whoever_is_not_on_the_front_is_dominated_by_one_that_is(figures):
    on_front = front(figures)
    assert on_front.any()
    for i in np.flatnonzero(~on_front):
        assert any(
            (figures[j] <= figures[i]).all() and (figures[j] < figures[i]).any() for j in np.flatnonzero(on_front)
        )
