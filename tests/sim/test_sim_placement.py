"""Experts of simulated groups on their ranks."""

from dataclasses import replace

import numpy as np
import pytest

from coterie.calibration import fit
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.placement import Placement, balance
from coterie.sim.placement import BusiestRank, contiguous, placements_of
from made_traces import domains_differ, without_output


def test_contiguous_blocks_are_as_even_as_they_can_be():
    assert contiguous(ModelGeometry(2, 8, 2), 4).rank_of_expert().tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    assert contiguous(ModelGeometry(1, 10, 2), 4).rank_of_expert().tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 3, 3]]


def test_the_busiest_rank_is_that_of_each_layer():
    placement = Placement(np.array([[0, 1, 2, 3], [0, 2, 1, 3]]), np.array([0, 0, 1, 1]), np.ones((2, 4)))
    used = np.array([[0.5, 1.0, 0.25, 0.0], [0.0, 1.0, 0.0, 1.0]])
    assert placement.loads(used).tolist() == [[1.5, 0.25], [0.0, 2.0]]
    assert BusiestRank(placement)(used) == 3.5


def test_each_group_is_balanced_for_the_requests_that_it_gets():
    trace = domains_differ(160)
    profile = fit(trace, 4, starts=1, pairs=100)
    nearest = (profile.transform.apply(trace.prefill) @ profile.centroids.T).argmax(axis=1)
    plain = BusiestRank(contiguous(trace.geometry, 4))
    for k, placement in enumerate(placements_of(profile, trace, 4, batch=8)):
        share = (trace.decode / trace.decode_covered[:, None, None])[nearest == k]
        active = 1 - np.prod(1 - share[:8], axis=0)
        assert BusiestRank(placement)(active) < 0.95 * plain(active)


def test_what_cannot_be_placed_is_refused():
    trace = domains_differ(40)
    profile = fit(trace, 4, starts=1, pairs=100)
    with pytest.raises(InputError, match="32 slots for 33 ranks"):
        contiguous(trace.geometry, 33)
    with pytest.raises(InputError, match="an expert has replicas"):
        BusiestRank(balance(np.array([[5.0, 1.0, 1.0]]), [2, 2]))
    with pytest.raises(InputError, match="no counted output token"):
        placements_of(profile, without_output(trace), 2)
    other = replace(profile.transform, geometry=ModelGeometry(3, 64, 2), idf=np.ones((3, 64), np.float32))
    with pytest.raises(InputError, match="the trace is of 3 layers x 32"):
        placements_of(replace(profile, transform=other, centroids=np.eye(4, 192, dtype=np.float32)), trace, 2)
