from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from coterie.clustering import align_centroids, balanced_assignment, balanced_kmeans
from coterie.errors import InputError

COSINES = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(-1, 1)


@st.composite
def problems(draw, most_rows, most_clusters):
    rows, clusters = draw(st.integers(1, most_rows)), draw(st.integers(1, most_clusters))
    capacity = -(-rows // clusters) + draw(st.integers(0, 1))
    return draw(arrays(np.float64, (rows, clusters), elements=COSINES)), capacity


def unit_rows(rng, rows, dimensions):
    drawn = rng.normal(size=(rows, dimensions))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def total(similarity, labels):
    return similarity[np.arange(len(labels)), labels].sum()


def best_by_enumeration(similarity, capacity):
    rows, clusters = similarity.shape
    allowed = (labels for labels in product(range(clusters), repeat=rows) if np.bincount(labels).max() <= capacity)
    return max(total(similarity, np.array(labels)) for labels in allowed)


# --- assignment ---------------------------------------------------------------------------------------


@given(problems(most_rows=6, most_clusters=3))
def test_assignment_equals_the_best_of_all_assignments(problem):
    similarity, capacity = problem
    labels = balanced_assignment(similarity, capacity)
    assert np.bincount(labels).max() <= capacity
    assert total(similarity, labels) == pytest.approx(best_by_enumeration(similarity, capacity), abs=1e-10)


@given(problems(most_rows=60, most_clusters=9))
def test_assignment_equals_the_hungarian_optimum(problem):
    similarity, capacity = problem
    labels = balanced_assignment(similarity, capacity)
    slots = np.repeat(similarity, capacity, axis=1)
    assert np.bincount(labels).max() <= capacity
    assert total(similarity, labels) == pytest.approx(
        slots[linear_sum_assignment(slots, maximize=True)].sum(), abs=1e-9
    )


@pytest.mark.parametrize("pull", [0.0, 0.3, 3.0])
def test_assignment_of_hundreds_of_skewed_rows_is_optimal(pull):
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(240, 12)) + pull  # the larger the pull, the more rows want the same clusters
    similarity = rows @ rows[:10].T / 100
    labels = balanced_assignment(similarity, 24)
    slots = np.repeat(similarity, 24, axis=1)
    assert np.bincount(labels).tolist() == [24] * 10
    assert total(similarity, labels) == pytest.approx(
        slots[linear_sum_assignment(slots, maximize=True)].sum(), abs=1e-8
    )


def test_assignment_by_hand():
    # all three prefer cluster 0, which holds two; moving row 1 costs least: 0.9 - 0.8
    similarity = np.array([[0.9, 0.1], [0.9, 0.8], [0.9, 0.5]])
    assert balanced_assignment(similarity, 2).tolist() == [0, 1, 0]


def test_a_chain_of_moves_beats_the_direct_one():
    # clusters hold one row each. Row 1 -> cluster 2 directly costs 0.9; row 1 -> 1 and row 2 -> 2 cost 0.1 each.
    similarity = np.array([[0.9, 0.0, 0.0], [0.9, 0.8, 0.0], [0.0, 0.9, 0.8]])
    assert balanced_assignment(similarity, 1).tolist() == [0, 1, 2]


def test_identical_rows_are_divided_in_full_shares():
    assert np.bincount(balanced_assignment(np.ones((7, 3)), 3), minlength=3).max() == 3


@pytest.mark.parametrize(
    ("similarity", "capacity", "problem"),
    [
        (np.zeros((5, 2)), 2, "2 clusters of at most 2 cannot hold 5 rows"),
        (np.array([[np.nan]]), 1, "finite"),
        (np.array([[-np.inf]]), 1, "finite"),
        (np.array([[1e6]]), 1, "magnitude up to 1000"),
    ],
)
def test_impossible_assignments_are_refused(similarity, capacity, problem):
    with pytest.raises(InputError, match=problem):
        balanced_assignment(similarity, capacity)


# --- k-means ------------------------------------------------------------------------------------------


def test_separate_groups_are_found():
    rng = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2, 3], 25)
    rows = np.eye(4)[truth] + rng.normal(scale=0.1, size=(100, 4))
    found = balanced_kmeans(rows / np.linalg.norm(rows, axis=1, keepdims=True), 4, np.random.default_rng(1))
    assert sorted(np.bincount(truth * 4 + found.labels, minlength=16)) == [0] * 12 + [25] * 4


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32))
def test_no_cluster_exceeds_its_share_and_centroids_are_unit(rows, clusters, seed):
    rng = np.random.default_rng(seed)
    clusters = min(rows, clusters)
    found = balanced_kmeans(unit_rows(rng, rows, 5), clusters, rng, starts=2)
    assert np.bincount(found.labels, minlength=clusters).max() <= -(-rows // clusters)
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1)


def test_a_converged_clustering_is_a_fixed_point():
    rows = unit_rows(np.random.default_rng(3), 60, 6)
    found = balanced_kmeans(rows, 4, np.random.default_rng(4), starts=1)
    assert balanced_assignment(rows @ found.centroids.T, 15).tolist() == found.labels.tolist()
    for k in range(4):
        mean = rows[found.labels == k].sum(axis=0)
        np.testing.assert_allclose(found.centroids[k], mean / np.linalg.norm(mean))


def test_more_rounds_never_lower_the_cohesion():
    rows = unit_rows(np.random.default_rng(5), 80, 4)
    cohesions = [
        balanced_kmeans(rows, 6, np.random.default_rng(6), starts=1, max_rounds=n).cohesion for n in range(1, 12)
    ]
    assert (np.diff(cohesions) >= -1e-12).all()
    assert cohesions[-1] > cohesions[0]


def test_more_starts_never_lower_the_cohesion():
    rows = unit_rows(np.random.default_rng(8), 50, 4)
    cohesions = [balanced_kmeans(rows, 7, np.random.default_rng(9), starts=n).cohesion for n in range(1, 8)]
    assert (np.diff(cohesions) >= 0).all()
    assert cohesions[-1] > cohesions[0]


def test_the_same_seed_gives_the_same_bytes():
    rows = unit_rows(np.random.default_rng(1), 90, 8).astype(np.float32)
    one, two = (balanced_kmeans(rows, 5, np.random.default_rng(2)) for _ in range(2))
    assert one.centroids.tobytes() == two.centroids.tobytes()
    assert one.labels.tobytes() == two.labels.tobytes()


def test_as_many_clusters_as_rows_gives_each_row_its_own():
    rows = unit_rows(np.random.default_rng(2), 6, 5)
    found = balanced_kmeans(rows, 6, np.random.default_rng(0))
    assert sorted(found.labels) == list(range(6))
    np.testing.assert_allclose(found.centroids[found.labels], rows)
    assert found.cohesion == pytest.approx(1)


def test_one_cluster_holds_everything():
    rows = unit_rows(np.random.default_rng(2), 6, 5)
    assert balanced_kmeans(rows, 1, np.random.default_rng(0)).labels.tolist() == [0] * 6


def test_identical_rows_share_one_centroid_in_equal_parts():
    found = balanced_kmeans(np.tile([[0.6, 0.8]], (9, 1)), 3, np.random.default_rng(0))
    np.testing.assert_allclose(found.centroids, [[0.6, 0.8]] * 3)
    assert np.bincount(found.labels).tolist() == [3, 3, 3]


def test_an_empty_cluster_keeps_its_centroid():
    # 5 rows, 4 clusters of at most 2: five equal rows fill clusters 0, 1 and half of 2; cluster 3 stays empty
    found = balanced_kmeans(np.tile([[1.0, 0.0]], (5, 1)), 4, np.random.default_rng(0))
    assert np.bincount(found.labels, minlength=4).tolist() == [2, 2, 1, 0]
    assert found.centroids[3].tolist() == [1, 0]


def test_rows_that_cancel_out_keep_the_centroid():
    found = balanced_kmeans(np.array([[1.0, 0.0], [-1.0, 0.0]]), 1, np.random.default_rng(0))
    assert np.abs(found.centroids).tolist() == [[1, 0]]
    assert found.cohesion == 0


@pytest.mark.parametrize(
    ("rows", "clusters", "problem"),
    [
        (np.eye(3), 4, "3 rows cannot make 4 clusters; give 1 to 3"),
        (np.eye(3), 0, "cannot make 0 clusters"),
        (np.eye(3) * 2, 2, "row 0 has length 2, not 1"),
        (np.diag([1.0, 0.0, 1.0]), 2, "row 1 has length 0, not 1"),
        (np.diag([1.0, 1.0, np.nan]), 2, "rows hold a value that is not finite"),
        (np.ones(3), 2, r"rows of shape \(3,\)"),
        (np.eye(3, dtype=np.int64), 2, "int64 are not"),
    ],
)
def test_bad_rows_are_refused(rows, clusters, problem):
    with pytest.raises(InputError, match=problem):
        balanced_kmeans(rows, clusters, np.random.default_rng(0))


def test_no_starts_are_refused():
    with pytest.raises(InputError, match="starts and rounds must be at least 1, got 0 and 50"):
        balanced_kmeans(np.eye(3), 2, np.random.default_rng(0), starts=0)


# --- alignment ----------------------------------------------------------------------------------------


def test_alignment_undoes_any_permutation():
    current = unit_rows(np.random.default_rng(0), 4, 6)
    for order in permutations(range(4)):
        shuffled = current[list(order)]
        np.testing.assert_array_equal(shuffled[align_centroids(current, shuffled)], current)


def test_alignment_is_the_best_of_all_orders():
    rng = np.random.default_rng(1)
    current, new = unit_rows(rng, 5, 3), unit_rows(rng, 5, 3)
    best = max(permutations(range(5)), key=lambda order: (current * new[list(order)]).sum())
    assert align_centroids(current, new).tolist() == list(best)


def test_alignment_of_different_shapes_is_refused():
    with pytest.raises(InputError, match=r"\(3, 2\) cannot take the place of \(2, 2\)"):
        align_centroids(np.zeros((2, 2)), np.zeros((3, 2)))
