import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.routing.partition import Partition, deal

AXES = np.eye(6, dtype=np.float32)
NAMES = "abcdef"


def partition(groups="abc"):
    """Group k owns the axis k."""
    return Partition(AXES[: len(groups)], {group: k for k, group in enumerate(groups)})


def owned(found):
    """Which axis each group owns."""
    return {group: int(found.centroids[row].argmax()) for group, row in found.row_of.items()}


# --- another pool -------------------------------------------------------------------------------------


def test_who_stays_keeps_its_centroid_when_a_group_is_lost():
    found = partition().over("ac", {})
    assert owned(found) == {"a": 0, "c": 2}
    assert len(found.centroids) == 2


def test_a_new_group_shares_the_centroid_with_most_requests_in_flight():
    found = partition().over("abcd", {"a": 3, "b": 5, "c": 4})
    assert owned(found) == {"a": 0, "b": 1, "c": 2, "d": 1}
    assert len(found.centroids) == 3


def test_what_is_shared_already_counts_for_each_of_its_groups():
    # b has 6, shared by two 3 each; then a with 4 is the fullest
    found = partition().over("abcde", {"a": 4, "b": 6, "c": 1})
    assert owned(found) == {"a": 0, "b": 1, "c": 2, "d": 1, "e": 0}


def test_a_group_joins_in_the_place_of_one_that_is_lost():
    found = partition().over("acd", {"a": 1, "c": 2})
    assert owned(found) == {"a": 0, "c": 2, "d": 2}


def test_when_one_of_two_that_share_is_lost_the_other_has_it_alone():
    shared = partition().over("abcd", {"b": 5})
    assert owned(shared.over("acd", {})) == {"a": 0, "c": 2, "d": 1}


def test_a_pool_of_new_groups_is_dealt_the_same_centroids():
    assert owned(partition().over("xyz", {})) == {"x": 0, "y": 1, "z": 2}


@given(
    st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=5),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)),
)
def test_every_group_has_a_centroid_and_every_centroid_a_group_whatever_comes_and_goes(pools, requests):
    found = partition()
    for pool in pools:
        before, found = found, found.over(sorted(pool), requests)
        assert found.groups == tuple(sorted(pool))
        assert set(found.row_of.values()) == set(range(len(found.centroids)))
        kept = pool & set(before.groups)
        assert all(owned(found)[group] == owned(before)[group] for group in kept)


# --- a profile of another number ----------------------------------------------------------------------


def test_as_many_centroids_as_groups_are_dealt_in_order():
    assert owned(deal(AXES[:3], np.array([5, 1, 3]), "abc")) == {"a": 0, "b": 1, "c": 2}


def test_too_few_are_shared_by_their_sizes():
    assert owned(deal(AXES[:2], np.array([6, 5]), "abcde")) == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}


def test_of_too_many_the_smallest_is_merged_into_the_one_that_is_most_like_it():
    near = np.array([0, 0.6, 0.8, 0, 0, 0], np.float32)  # of one request; most like axis 2, of three
    found = deal(np.stack([AXES[0], near, AXES[2]]), np.array([4, 1, 3]), "ab")
    merged = np.array([0, 0.6, 3.8, 0, 0, 0]) / np.hypot(0.6, 3.8)  # 3 * axis 2 + 1 * near
    assert found.row_of == {"a": 0, "b": 1}
    np.testing.assert_allclose(found.centroids, np.stack([AXES[0], merged]), rtol=1e-6)


def test_opposite_centroids_are_merged_without_a_direction_of_their_own():
    found = deal(np.stack([AXES[0], -AXES[0]]), np.array([1, 1]), "a")
    assert abs(float(found.centroids[0, 0])) == 1


# --- where a fit begins -------------------------------------------------------------------------------


def test_a_fit_begins_at_the_centroids_where_each_group_has_its_own():
    np.testing.assert_array_equal(partition().seeds(np.repeat(AXES[:3], 2, axis=0)), AXES[:3])


@pytest.mark.parametrize("first", [3, 4])
def test_what_two_groups_share_is_halved_and_the_nearer_half_stays_with_the_first(first):
    # b and d share axis 1; near it are requests that lean to axis 3, and some that lean to axis 4 and are further away
    lean, leaning_more = (AXES[1] + 0.5 * AXES[first]) / np.sqrt(1.25), (AXES[1] + AXES[7 - first]) / np.sqrt(2)
    signatures = np.stack([AXES[0], AXES[0], lean, lean, leaning_more, leaning_more, AXES[2], AXES[2]])
    seeds = partition().over("abcd", {"b": 1}).seeds(signatures.astype(np.float32))
    np.testing.assert_allclose(seeds, np.stack([AXES[0], lean, AXES[2], leaning_more]), rtol=1e-6)
