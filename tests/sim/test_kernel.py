import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.sim.kernel import Kernel, Priority


def test_events_run_in_the_order_of_time_priority_and_sequence():
    kernel, log = Kernel(), []
    for name, time_s, priority in [
        ("late", 2.0, Priority.CHANGE),
        ("start", 1.0, Priority.START),
        ("first end", 1.0, Priority.END),
        ("arrival", 1.0, Priority.ARRIVAL),
        ("second end", 1.0, Priority.END),
        ("change", 1.0, Priority.CHANGE),
    ]:
        kernel.at(time_s, priority, log.append, name)
    kernel.run()
    assert log == ["change", "first end", "second end", "arrival", "start", "late"]


def test_an_event_may_bring_others_of_the_same_moment():
    kernel, log = Kernel(), []
    kernel.at(1.0, Priority.END, lambda: kernel.after(0, Priority.START, log.append, ("start", kernel.now())))
    kernel.at(1.0, Priority.ARRIVAL, lambda: log.append(("arrival", kernel.now())))
    kernel.run()
    assert log == [("arrival", 1.0), ("start", 1.0)]


def test_a_step_without_events_says_so_and_time_stays():
    kernel = Kernel()
    kernel.at(3.0, Priority.END, int)
    assert kernel.step()
    assert not kernel.step()
    assert (kernel.now(), len(kernel)) == (3.0, 0)


def test_ticks_come_as_long_as_anything_else_does():
    kernel, log = Kernel(), []
    kernel.every(1.0, lambda: log.append(("tick", kernel.now())))
    kernel.every(2.0, lambda: log.append(("tock", kernel.now())))
    kernel.at(2.5, Priority.ARRIVAL, lambda: log.append(("end", kernel.now())))
    kernel.run()
    assert log == [("tick", 1.0), ("tock", 2.0), ("tick", 2.0), ("end", 2.5)]
    assert not kernel


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 9), st.sampled_from(Priority)), max_size=30))
def test_time_never_goes_back(events):
    kernel, seen = Kernel(), []
    for time_s, priority in events:
        kernel.at(time_s, priority, lambda: seen.append(kernel.now()))
    kernel.run()
    assert seen == sorted(time_s for time_s, _ in events)


@pytest.mark.parametrize("time_s", [0.5, float("nan")])
def test_no_event_can_be_in_the_past(time_s):
    kernel = Kernel()
    kernel.at(1.0, Priority.END, int)
    kernel.run()
    with pytest.raises(AssertionError):
        kernel.at(time_s, Priority.END, int)
