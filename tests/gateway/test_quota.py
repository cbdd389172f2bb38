"""How much a key may ask for, by the minute and at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.edge.keys import Key
from coterie.gateway.edge.quota import Allowance, Excess, Quota


def quota(**limits: int) -> Quota:
    return Quota(Key(name="a", sha256="0" * 64, **limits), 0.0)


def test_no_more_than_may_be_in_flight_are() -> None:
    two = quota(max_in_flight=2)
    assert [two.enter(0.0) for _ in range(3)] == [None, None, Excess("max_in_flight", 2, 1.0)]
    two.leave(0, 0.0)
    assert two.enter(0.0) is None


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one() -> None:
    six = quota(requests_per_minute=6)
    assert [six.enter(0.0) for _ in range(7)] == [None] * 6 + [Excess("requests_per_minute", 6, 10.0)]
    # One of six a minute: each takes ten seconds.
    assert six.enter(5.0) == Excess("requests_per_minute", 6, 5.0)
    assert six.enter(10.0) is None


def test_tokens_are_paid_for_when_they_are_known_and_a_debt_is_waited_for() -> None:
    sixty = quota(tokens_per_minute=60)
    assert sixty.enter(0.0) is None
    assert sixty.enter(0.0) is None  # nothing was used so far
    sixty.leave(100, 0.0)  # 60 - 100 = -40
    # It takes 41 s at one a second to have one again.
    assert sixty.enter(0.0) == Excess("tokens_per_minute", 60, 41.0)
    assert sixty.enter(41.0) is None


def test_what_is_refused_uses_nothing() -> None:
    both = quota(max_in_flight=1, requests_per_minute=2)
    assert both.enter(0.0) is None
    assert both.enter(0.0) is not None
    both.leave(0, 0.0)
    assert both.enter(0.0) is None  # the second of two


@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=200))
def test_no_minute_has_more_than_twice_what_a_minute_may_have(per_minute: int, gaps_s: list[float]) -> None:
    allowance, now_s = Allowance(per_minute, 0.0), 0.0
    taken: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        if not allowance.wait_s(1, now_s):
            allowance.take(1, now_s)
            taken.append(now_s)
    for start_s in taken:
        assert sum(start_s <= at_s < start_s + 60 for at_s in taken) <= 2 * per_minute


@given(st.floats(0.5, 1e4), st.floats(0, 1e4))
def test_after_the_wait_that_was_told_there_is_enough(used: float, later_s: float) -> None:
    allowance = Allowance(10, 0.0)
    allowance.take(used, 0.0)
    told_s = allowance.wait_s(1, min(later_s, 1.0))
    assert allowance.wait_s(1, min(later_s, 1.0) + told_s + 1e-6) == 0
