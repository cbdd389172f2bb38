"""A kernel that takes its time, on a clock that only it moves."""

import numpy as np
import pytest

from coterie.clock import ManualClock
from coterie.errors import ConfigError
from coterie.experts.server.paced import PacedKernel


class Kernel:
    name = "fake"

    def __init__(self, clock, takes_s=0.0):
        self.clock, self.takes_s = clock, takes_s

    def compute(self, weights, rows, places, router):
        self.clock.advance(self.takes_s)
        return rows


def compute(kernel, pairs):
    """A batch of so many pairs, and two that are another server's."""
    places = np.array([[0] * pairs + [-1, -1]])
    rows = np.zeros((1, 4), np.float32)
    assert kernel.compute(None, rows, places, places) is rows


@pytest.fixture
def clock():
    return ManualClock(100.0)


def test_a_batch_takes_the_time_of_its_pairs_what_is_computed_included(clock):
    kernel = PacedKernel(Kernel(clock, takes_s=0.1), 10, clock.now, clock.advance)
    compute(kernel, 3)
    assert clock.now() == pytest.approx(100.3)


def test_a_batch_that_takes_longer_is_not_made_longer(clock):
    kernel = PacedKernel(Kernel(clock, takes_s=2.0), 10, clock.now, clock.advance)
    compute(kernel, 3)
    assert clock.now() == 102


def test_what_sleep_takes_too_long_is_made_up_for_and_idle_time_is_not(clock):
    kernel = PacedKernel(Kernel(clock), 10, clock.now, lambda left_s: clock.advance(left_s + 0.004))
    for _ in range(100):
        compute(kernel, 1)
    assert clock.now() == pytest.approx(110.004)
    clock.advance(1000)
    compute(kernel, 1)
    assert clock.now() == pytest.approx(1110.104)  # the lateness of 0.004 is made up for, and comes again


def test_a_pace_must_be_positive(clock):
    with pytest.raises(ConfigError, match="at most 0 pairs in a second"):
        PacedKernel(Kernel(clock), 0)
