import math

import pytest

from coterie.errors import InputError
from coterie.sim.paired import PairedChange, paired_change


def test_the_interval_is_student_s_over_the_pairs():
    found = paired_change([9.0, 8.0, 10.0], [10.0, 10.0, 10.0])
    # Changes -0.1, -0.2, 0: mean -0.1, standard deviation 0.1, t(0.975, 2) = 4.3027
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert found == PairedChange(pytest.approx(-0.1), pytest.approx(-0.1 - half), pytest.approx(-0.1 + half))


def test_pairs_that_change_alike_leave_no_doubt_however_much_seeds_differ():
    found = paired_change([90.0, 9.0], [100.0, 10.0])
    assert (found.mean, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1))


def test_one_seed_says_nothing_of_others():
    assert paired_change([9.0], [10.0]) == PairedChange(pytest.approx(-0.1), -math.inf, math.inf)


def test_figures_must_come_in_pairs():
    for own, other in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(InputError, match="paired change"):
            paired_change(own, other)
