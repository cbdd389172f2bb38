import numpy as np
import pytest

from coterie.analysis.usage import domain_use, expert_skew
from coterie.errors import InputError


def test_skew_is_the_one_computed_by_hand():
    # 4 requests of 3 tokens; x = 6 3 3 0: mean 3; Gini (-3*0 - 1*3 + 1*3 + 3*6) / (4 * 12) = 18/48
    counts = np.array([[[3, 0, 0, 0]], [[3, 0, 0, 0]], [[0, 3, 0, 0]], [[0, 0, 3, 0]]], dtype=np.uint8)
    (layer,) = expert_skew(counts, np.array([3, 3, 3, 3]), hottest=3)
    assert (layer.layer, layer.max_over_mean, layer.gini, layer.unused) == (0, 2, 18 / 48, 1)
    assert [(hot.expert, hot.share) for hot in layer.hot] == [(0, 0.5), (1, 0.25), (2, 0.25)]


def test_even_use_has_no_skew_and_a_single_expert_the_most():
    counts = np.array([[[2, 2, 2, 2], [8, 0, 0, 0]]], dtype=np.uint8)
    even, single = expert_skew(counts, np.array([8]))
    assert (even.max_over_mean, even.gini) == (1, 0)
    assert (single.max_over_mean, single.gini, single.unused) == (4, 0.75, 3)


def test_sums_do_not_overflow_the_counts_dtype():
    counts = np.full((300, 1, 2), 255, dtype=np.uint8)
    assert expert_skew(counts, np.full(300, 255))[0].hot[0].share == 1


def test_groups_that_share_no_expert_differ_by_half_and_equal_ones_by_nothing():
    # layer 0: p = (1, 0) and (0, 1), mean (1/2, 1/2): distance 1/2; layer 1: both (1, 0)
    counts = np.array([[[4, 0], [4, 0]], [[0, 2], [2, 0]]], dtype=np.uint8)
    found = domain_use(counts, np.array([4, 2]), {"a": np.array([0]), "b": np.array([1])})
    assert found.names == ("a", "b")
    assert found.difference.tolist() == [0.5, 0.0]
    assert found.layer == 0
    assert found.share.tolist() == [[1, 0], [0, 1]]


def test_the_share_is_of_tokens_so_that_top_k_of_them_add_up_to_k():
    counts = np.array([[[2, 2, 0]]], dtype=np.uint8)
    assert domain_use(counts, np.array([2]), {"a": np.array([0])}).share.tolist() == [[1, 1, 0]]


def test_nothing_counted_and_no_groups_are_refused():
    nothing = np.zeros((1, 1, 2), dtype=np.uint8)
    with pytest.raises(InputError, match="no tokens"):
        expert_skew(nothing, np.array([0]))
    for groups in ({}, {"a": np.array([0])}):
        with pytest.raises(InputError, match="groups"):
            domain_use(nothing, np.array([0]), groups)
