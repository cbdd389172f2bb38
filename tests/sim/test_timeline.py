"""TPOT over time, with figures worked out by hand."""

import pytest

from coterie.errors import ConfigError
from coterie.metrics import RequestTimeline
from coterie.sim.outcomes import Outcomes
from coterie.sim.spec import Change
from coterie.sim.timeline import Event, Recovery, Window, events_of, recoveries, windows
from coterie.sim.workload import Drift, Mix


def outcomes_of(ends, *, failed=(), since_s=0.0, last_arrival_s=20.0):
    """Requests that took 10 tokens after the first, each by its end and milliseconds per token."""
    outcomes = Outcomes(since_s)
    for end_s, tpot_ms in ends:
        outcomes.finish(RequestTimeline(end_s - tpot_ms / 100, end_s - tpot_ms / 100, end_s, 11), 0)
    for time_s in failed:
        outcomes.fail(since_s, time_s)
    outcomes.arrive(last_arrival_s)
    return outcomes


def test_requests_count_in_the_window_in_which_they_end():
    found = windows(outcomes_of([(1, 10), (4.9, 30), (5, 50), (19, 70), (24, 90)], failed=[7, 8]), 5.0)
    assert [(w.start_s, w.finished, w.failed) for w in found] == [(0, 2, 0), (5, 1, 2), (10, 0, 0), (15, 1, 0)]
    assert [w.tpot_p50_ms for w in found] == [pytest.approx(20), pytest.approx(50), None, pytest.approx(70)]
    assert found[0].tpot_p99_ms == pytest.approx(10 + 0.99 * 20)


def test_windows_begin_after_the_warm_up_and_end_before_the_cluster_empties():
    found = windows(outcomes_of([(13, 10), (17, 20)], since_s=12.0, last_arrival_s=23.9), 5.0)
    assert [(w.start_s, w.finished) for w in found] == [(12, 1), (17, 1)]
    assert windows(Outcomes(30.0)) == ()
    with pytest.raises(ConfigError, match="width must be above zero"):
        windows(Outcomes(0.0), 0.0)


def test_requests_of_a_single_token_have_no_time_per_token():
    outcomes = Outcomes(0.0)
    outcomes.finish(RequestTimeline(0.0, 1.0, 1.0, 1), 0)
    outcomes.arrive(5.0)
    assert windows(outcomes, 5.0) == (Window(0.0, 1, 0, None, None),)


def test_events_are_those_that_come_in_time_order():
    changes = [Change(60, "decode-3", "lost"), Change(0, "decode-2", "lost"), Change(30, "decode-1", "joined")]
    drift = Drift(((0.0, Mix((("a", 1.0),))), (45.0, Mix((("b", 1.0),)))))
    assert events_of(changes, drift) == (
        Event(30, "decode-1 joined"),
        Event(45.0, "the mix changes"),
        Event(60, "decode-3 lost"),
    )


def timeline(*p50s):
    return [Window(5.0 * i, 1, 0, p50, p50) for i, p50 in enumerate(p50s)]


def test_recovery_is_the_end_of_the_last_window_that_was_5_percent_above():
    found = timeline(99, 20, 10, 12, 10, 10, 15, 10.6, 10.4, 10.0)
    # The last four windows that end by 25 s: 20, 10, 12, 10.
    (felt,) = recoveries(found, [Event(25.0, "decode-1 lost")])
    assert felt.before_ms == 11.0
    assert (felt.worst_ms, felt.after_s) == (15, 10.0)  # 15 in the window that ends at 35 s; 11.55 is the limit


@pytest.mark.parametrize(
    ("p50s", "after_s"),
    [
        ((10, 10, 10, 10), 0.0),
        ((10, 10, 9, 8), 0.0),
        ((10, 10, 12, 10), 5.0),
        ((10, 10, 10, 12), None),
        ((10, 10, None, 10), 0.0),
        ((10, 10), None),
        ((None, None, 10, 10), None),
    ],
)
def test_what_never_left_recovers_at_once_and_what_lasts_does_not(p50s, after_s):
    (felt,) = recoveries(timeline(*p50s), [Event(10.0, "x")])
    assert felt.after_s == after_s


def test_each_event_ends_what_is_known_of_the_one_before_and_those_of_one_moment_are_one():
    found = timeline(10, 10, 30, 30, 30, 40, 30, 30)
    events = [Event(10.0, "a lost"), Event(20.0, "b lost"), Event(20.0, "c lost")]
    assert recoveries(found, events) == (
        Recovery(10.0, "a lost", 10.0, 30, None),
        Recovery(20.0, "b lost, c lost", 30.0, 40, 10.0),
    )
