from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.calibration import fit
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.sim.placement import Placement, balanced, contiguous, placements_of
from made_traces import domains_differ, without_output


def test_contiguous_blocks_are_as_even_as_they_can_be():
    assert contiguous(ModelGeometry(2, 8, 2), 4).rank_of.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    assert np.bincount(contiguous(ModelGeometry(1, 10, 2), 4).rank_of[0]).tolist() == [3, 2, 3, 2]


def test_the_busiest_rank_is_that_of_each_layer():
    placement = Placement(np.array([[0, 0, 1, 1], [0, 1, 0, 1]]), 2)
    use = np.array([[0.5, 1.0, 0.25, 0.0], [0.0, 1.0, 0.0, 1.0]])
    assert placement.loads(use).tolist() == [[1.5, 0.25], [0.0, 2.0]]
    assert placement.busiest(use) == 3.5


def test_the_most_used_experts_are_dealt_first_to_the_least_loaded_rank_with_room():
    # 9 to rank 0, 8 to rank 1, 2 to rank 1 (8 < 9), which is full; 1 to rank 0.
    assert balanced(np.array([[2.0, 9.0, 1.0, 8.0]]), 2).rank_of.tolist() == [[1, 0, 0, 1]]
    # Rank 0 takes the 9; rank 1 all others until it is full, so the last goes to rank 0 although that is loaded more.
    assert balanced(np.array([[9.0, 1.0, 1.0, 1.0]]), 2).rank_of.tolist() == [[0, 1, 1, 0]]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
def test_each_rank_holds_as_many_experts_as_every_other(ranks, each, seed):
    use = np.random.default_rng(seed).random((3, ranks * each))
    for layer in balanced(use, ranks).rank_of:
        assert np.bincount(layer, minlength=ranks).tolist() == [each] * ranks


def test_each_group_is_balanced_for_the_requests_that_it_gets():
    trace = domains_differ(160)
    profile = fit(trace, 4, starts=1, pairs=100)
    placements = placements_of(profile, trace, 4, batch=8)
    nearest = (profile.transform.apply(trace.prefill) @ profile.centroids.T).argmax(axis=1)
    plain = contiguous(trace.geometry, 4)
    for k, placement in enumerate(placements):
        share = (trace.decode / trace.decode_covered[:, None, None])[nearest == k]
        active = 1 - np.prod(1 - share[:8], axis=0)
        assert placement.busiest(active) < 0.95 * plain.busiest(active)


def test_what_cannot_be_placed_is_refused():
    trace = domains_differ(40)
    profile = fit(trace, 4, starts=1, pairs=100)
    with pytest.raises(InputError, match="33 ranks for 32 experts"):
        contiguous(trace.geometry, 33)
    with pytest.raises(InputError, match="negative or not finite"):
        balanced(np.array([[1.0, np.nan]]), 2)
    with pytest.raises(InputError, match="ranks 0 to 2"):
        Placement(np.array([[0, 2]]), 2)
    with pytest.raises(InputError, match="no counted output token"):
        placements_of(profile, without_output(trace), 2, batch=8)
    other = replace(profile.transform, geometry=ModelGeometry(3, 64, 2), idf=np.ones((3, 64), np.float32))
    with pytest.raises(InputError, match="the trace is of 3 layers x 32"):
        placements_of(replace(profile, transform=other, centroids=np.eye(4, 192, dtype=np.float32)), trace, 2, batch=8)
