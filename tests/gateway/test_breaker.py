"""When a breaker opens, for how long, and what closes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.fleet.breaker import Breaker, BreakerRules

RULES = BreakerRules(failures=3, open_s=1.0, most_open_s=4.0)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    assert breaker.failed(now_s, refused=True)
    return breaker


def test_three_failures_in_a_row_open_it_and_a_success_between_them_begins_the_row_anew() -> None:
    breaker = Breaker(RULES)
    assert [breaker.failed(0.0), breaker.failed(0.0)] == [False, False]
    breaker.succeeded()
    assert [breaker.failed(0.0) for _ in range(3)] == [False, False, True]
    assert breaker.state == "open"


def test_one_refused_connection_opens_it() -> None:
    assert opened().state == "open"


def test_the_trial_is_taken_once_and_not_before_the_time_is_over() -> None:
    breaker = opened(10.0)
    assert not breaker.begin_trial(10.9)
    assert breaker.begin_trial(11.0)
    assert not breaker.begin_trial(11.0)
    breaker.end_trial(11.5, well=True)
    assert breaker.state == "closed"


def test_each_failed_trial_doubles_the_time_up_to_a_bound() -> None:
    breaker, waits = opened(), []
    for _ in range(4):
        now_s = breaker.until_s
        assert breaker.begin_trial(now_s)
        breaker.end_trial(now_s, well=False)
        waits.append(breaker.until_s - now_s)
    assert waits == [2.0, 4.0, 4.0, 4.0]


def test_one_that_opens_again_soon_after_a_good_trial_is_open_for_longer_and_later_it_begins_anew() -> None:
    breaker = opened()
    breaker.begin_trial(1.0)
    breaker.end_trial(1.0, well=True)
    breaker.failed(1.5, refused=True)  # it was open for 1 s, and again 0.5 s later
    assert breaker.until_s == 3.5
    breaker.begin_trial(3.5)
    breaker.end_trial(3.5, well=True)
    breaker.failed(5.5, refused=True)  # it was open for 2 s, and again only 2 s later
    assert breaker.until_s == 6.5


def test_what_becomes_of_older_requests_while_it_is_open_changes_nothing() -> None:
    breaker = opened()
    assert not breaker.failed(0.5, refused=True)
    breaker.succeeded()
    assert (breaker.state, breaker.until_s) == ("open", 1.0)
    assert breaker.begin_trial(1.0)
    assert not breaker.failed(1.0, refused=True)
    assert breaker.state == "half-open"


EVENTS = st.sampled_from(["failed", "refused", "succeeded", "begin", "well", "badly"])


@given(st.lists(st.tuples(EVENTS, st.floats(0.0, 3.0)), max_size=60))
def test_whatever_happens_one_trial_at_a_time_and_no_wait_above_the_bound(events: list[tuple[str, float]]) -> None:
    breaker, now_s, trial, row = Breaker(RULES), 0.0, False, 0
    for event, wait_s in events:
        now_s += wait_s
        was = breaker.state
        if event in ("failed", "refused"):
            row += 1
            opens = breaker.failed(now_s, refused=event == "refused")
            assert opens == (was == "closed" and (event == "refused" or row >= RULES.failures))
        elif event == "succeeded":
            breaker.succeeded()
            row = 0
        elif event == "begin":
            due = was == "open" and now_s >= breaker.until_s
            assert breaker.begin_trial(now_s) == due
            trial = trial or due
        elif trial:
            breaker.end_trial(now_s, well=event == "well")
            trial, row = False, 0
        assert (breaker.state == "half-open") == trial
        if breaker.state == "open":
            assert breaker.until_s <= now_s + RULES.most_open_s
            row = 0
