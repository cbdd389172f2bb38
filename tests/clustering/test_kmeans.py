import os
import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.clustering import (
    align_centroids,
    balanced_assignment,
    balanced_kmeans,
    centroids_of,
    kmeans,
    refit,
)
from coterie.errors import InputError

METHODS = [balanced_kmeans, kmeans]


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def unit_rows(rng, rows, dimensions):
    return unit(rng.normal(size=(rows, dimensions)))


def four_groups(rng, rows=100, noise=0.1):
    truth = np.arange(rows) % 4
    return truth, unit(np.eye(4)[truth] + rng.normal(scale=noise, size=(rows, 4)))


def chance(seed=0):
    return np.random.default_rng(seed)


# --- laws ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_separate_groups_are_found(method):
    truth, rows = four_groups(chance())
    found = method(rows, 4, chance(1))
    assert sorted(np.bincount(truth * 4 + found.labels, minlength=16)) == [0] * 12 + [25] * 4


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32))
def test_no_cluster_exceeds_its_share_and_centroids_are_unit(rows, clusters, seed):
    rng = chance(seed)
    clusters = min(rows, clusters)
    found = balanced_kmeans(unit_rows(rng, rows, 5), clusters, rng, starts=2)
    assert np.bincount(found.labels, minlength=clusters).max() <= -(-rows // clusters)
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1)


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32), st.sampled_from(METHODS))
def test_cohesion_is_the_mean_cosine_to_the_own_centroid(rows, clusters, seed, method):
    points = unit_rows(chance(seed), rows, 5)
    found = method(points, min(rows, clusters), chance(seed), starts=2, max_rounds=2)
    assert found.cohesion == pytest.approx((points * found.centroids[found.labels]).sum() / rows, abs=1e-7)


def test_a_converged_clustering_is_a_fixed_point():
    rows = unit_rows(chance(3), 60, 6)
    found = balanced_kmeans(rows, 4, chance(4), starts=1)
    assert balanced_assignment(rows @ found.centroids.T, 15).tolist() == found.labels.tolist()
    for k in range(4):
        mean = rows[found.labels == k].sum(axis=0)
        np.testing.assert_allclose(found.centroids[k], mean / np.linalg.norm(mean), atol=1e-7)


def test_without_the_bound_each_row_is_at_its_nearest_centroid():
    rows = unit_rows(chance(3), 60, 6)
    found = kmeans(rows, 4, chance(4), starts=1)
    assert (rows @ found.centroids.T).argmax(axis=1).tolist() == found.labels.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_more_rounds_never_lower_the_cohesion(method):
    rows = unit_rows(chance(5), 80, 4)
    cohesions = [method(rows, 6, chance(6), starts=1, max_rounds=n).cohesion for n in range(1, 12)]
    assert (np.diff(cohesions) >= -1e-12).all()
    assert cohesions[-1] > cohesions[0]


def test_more_starts_never_lower_the_cohesion():
    rows = unit_rows(chance(8), 50, 4)
    cohesions = [balanced_kmeans(rows, 7, chance(9), starts=n).cohesion for n in range(1, 8)]
    assert (np.diff(cohesions) >= 0).all()
    assert cohesions[-1] > cohesions[0]


def test_starts_side_by_side_equal_starts_alone():
    rows = unit_rows(chance(8), 50, 4)
    together = balanced_kmeans(rows, 7, chance(9), starts=4)

    class OnlyStream:
        def __init__(self, stream):
            self.stream = stream

        def spawn(self, count):
            return [self.stream]

    alone = [balanced_kmeans(rows, 7, OnlyStream(stream), starts=1) for stream in chance(9).spawn(4)]
    best = max(alone, key=lambda found: found.cohesion)
    assert together.centroids.tobytes() == best.centroids.tobytes()
    assert together.labels.tobytes() == best.labels.tobytes()


def test_the_bound_costs_cohesion():
    rows = unit(chance(2).normal(size=(90, 5)) + 0.8)
    assert balanced_kmeans(rows, 4, chance(3)).cohesion < kmeans(rows, 4, chance(3)).cohesion


@pytest.mark.parametrize("order_of", ["rows", "dimensions"])
def test_order_does_not_matter(order_of):
    _, rows = four_groups(chance(), noise=0.6)
    begin = rows[:4]
    order = chance(1).permutation(100 if order_of == "rows" else 4)
    found = refit(rows, begin)
    if order_of == "rows":
        assert refit(rows[order], begin).labels.tolist() == found.labels[order].tolist()
    else:
        assert refit(rows[:, order], begin[:, order]).labels.tolist() == found.labels.tolist()


def test_rotating_the_space_keeps_the_labels():
    _, rows = four_groups(chance(), noise=0.6)
    rotation = np.linalg.qr(chance(1).normal(size=(4, 4)))[0]
    found, turned = refit(rows, rows[:4]), refit(rows @ rotation, rows[:4] @ rotation)
    assert turned.labels.tolist() == found.labels.tolist()
    np.testing.assert_allclose(turned.centroids, found.centroids @ rotation, atol=1e-7)


# --- reproducibility ----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes():
    rows = unit_rows(chance(1), 90, 8).astype(np.float32)
    one, two = (balanced_kmeans(rows, 5, chance(2)) for _ in range(2))
    assert one.centroids.tobytes() == two.centroids.tobytes()
    assert one.labels.tobytes() == two.labels.tobytes()


FIT_AND_HASH = """
import hashlib, numpy as np
from coterie.clustering import balanced_kmeans
rng = np.random.default_rng(0)
rows = rng.random((500, 3000), dtype=np.float32) + np.eye(8, 3000, dtype=np.float32)[rng.integers(8, size=500)] * 9
rows /= np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
found = balanced_kmeans(rows, 8, rng, starts=2)
print(hashlib.sha256(found.centroids.tobytes() + found.labels.tobytes()).hexdigest(), found.cohesion)
"""


def test_the_number_of_threads_does_not_change_a_bit():
    def under(threads):
        environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        command = [sys.executable, "-c", FIT_AND_HASH]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert under("1") == under("2")


def test_rows_are_left_as_they_were():
    rows = unit_rows(chance(1), 30, 8).astype(np.float32)
    before = rows.tobytes()
    balanced_kmeans(rows, 5, chance(2))
    assert rows.tobytes() == before


# --- seeding ------------------------------------------------------------------------------------------


def test_seeds_are_drawn_far_from_all_earlier_ones():
    # rows of a group are alike, and groups at right angles: one seed in each, whatever the order
    truth = np.repeat(np.arange(12), 5)
    for seed in range(5):
        found = kmeans(np.eye(12)[truth], 12, chance(seed), starts=1, max_rounds=1)
        assert len(set(found.labels)) == 12


# --- at the edges -------------------------------------------------------------------------------------


def test_as_many_clusters_as_rows_gives_each_row_its_own():
    rows = unit_rows(chance(2), 6, 5)
    found = balanced_kmeans(rows, 6, chance())
    assert sorted(found.labels) == list(range(6))
    np.testing.assert_allclose(found.centroids[found.labels], rows, atol=1e-7)
    assert found.cohesion == pytest.approx(1)


@pytest.mark.parametrize("method", METHODS)
def test_one_cluster_holds_everything_however_many_starts(method):
    rows = unit_rows(chance(2), 6, 5)
    one, many = method(rows, 1, chance(0), starts=1), method(rows, 1, chance(1), starts=20)
    assert one.labels.tolist() == many.labels.tolist() == [0] * 6
    assert one.centroids.tobytes() == many.centroids.tobytes()


def test_identical_rows_share_one_centroid_in_equal_parts():
    found = balanced_kmeans(np.tile([[0.6, 0.8]], (9, 1)), 3, chance())
    np.testing.assert_allclose(found.centroids, [[0.6, 0.8]] * 3, atol=1e-7)
    assert np.bincount(found.labels).tolist() == [3, 3, 3]
    assert found.cohesion == pytest.approx(1)


def test_without_the_bound_identical_rows_are_one_cluster():
    found = kmeans(np.tile([[0.6, 0.8]], (9, 1)), 3, chance())
    assert found.labels.tolist() == [0] * 9
    np.testing.assert_allclose(found.centroids, [[0.6, 0.8]] * 3, atol=1e-7)


def test_duplicates_of_few_rows_fill_clusters_of_their_own():
    truth = np.repeat([0, 1, 2], 4)
    found = balanced_kmeans(np.eye(3)[truth], 6, chance())
    assert found.cohesion == pytest.approx(1)
    assert np.bincount(found.labels).tolist() == [2] * 6
    assert all(len(set(truth[found.labels == k])) == 1 for k in range(6))


def test_an_empty_cluster_keeps_its_centroid():
    # 5 equal rows, 4 clusters of at most 2: at least one holds fewer, and a centroid without rows stays where it was
    found = balanced_kmeans(np.tile([[1.0, 0.0]], (5, 1)), 4, chance())
    sizes = np.bincount(found.labels, minlength=4)
    assert sizes.max() == 2
    assert sizes.sum() == 5
    assert found.centroids.tolist() == [[1, 0]] * 4


def test_rows_that_cancel_out_keep_the_centroid():
    found = balanced_kmeans(np.array([[1.0, 0.0], [-1.0, 0.0]]), 1, chance())
    assert np.abs(found.centroids).tolist() == [[1, 0]]
    assert found.cohesion == 0


def test_rows_that_nearly_cancel_out_keep_the_centroid():
    angles = np.arange(3) * 2 * np.pi / 3
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    found = balanced_kmeans(rows, 1, chance())
    assert np.isclose(rows @ found.centroids[0], 1).any()


def test_one_domain_is_divided_all_the_same():
    rows = unit(np.array([1.0, 0.0, 0.0, 0.0]) + chance().normal(scale=0.05, size=(40, 4)))
    found = balanced_kmeans(rows, 4, chance())
    assert np.bincount(found.labels).tolist() == [10] * 4
    assert found.cohesion > 0.99


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("rows", "clusters", "problem"),
    [
        (np.eye(3), 4, "3 rows cannot make 4 clusters; give 1 to 3"),
        (np.eye(3), 0, "cannot make 0 clusters"),
        (np.eye(3) * 2, 2, "row 0 has length 2, not 1"),
        (np.diag([1.0, 0.0, 1.0]), 2, "row 1 has length 0, not 1"),
        (np.diag([1.0, 1.0, np.nan]), 2, "row 2 holds a value that is not finite"),
        (np.diag([1.0, np.inf, 1.0]).astype(np.float32), 2, "row 1 holds a value that is not finite"),
        (np.ones(3), 2, r"rows of shape \(3,\)"),
        (np.ones((3, 0)), 2, "row 0 has length 0, not 1"),
        (np.eye(3, dtype=np.int64), 2, "int64 are not"),
        (np.eye(3, dtype=np.float16), 2, "float16 are not"),
    ],
)
def test_bad_rows_are_refused(rows, clusters, problem, method):
    with pytest.raises(InputError, match=problem):
        method(rows, clusters, chance())


@pytest.mark.parametrize("numbers", [{"starts": 0}, {"max_rounds": 0}])
def test_no_starts_and_no_rounds_are_refused(numbers):
    with pytest.raises(InputError, match="starts and rounds must be at least 1, got"):
        balanced_kmeans(np.eye(3), 2, chance(), **numbers)


# --- refit --------------------------------------------------------------------------------------------


def test_refit_from_the_result_changes_nothing():
    rows = unit_rows(chance(3), 60, 6)
    found = balanced_kmeans(rows, 4, chance(4))
    again = refit(rows, found.centroids)
    assert again.labels.tolist() == found.labels.tolist()
    np.testing.assert_allclose(again.centroids, found.centroids, atol=1e-7)


def test_refit_follows_rows_that_drift_and_keeps_every_cluster_in_its_place():
    truth, rows = four_groups(chance())
    begin = centroids_of(rows, truth, 4)
    drifted = unit(rows + np.array([0.3, 0.1, 0.0, 0.2]))
    moved = refit(drifted, begin)
    assert moved.labels.tolist() == truth.tolist()
    np.testing.assert_allclose(moved.centroids, centroids_of(drifted, truth, 4))
    assert moved.cohesion > (drifted * begin[truth]).sum() / 100


def test_refit_puts_clusters_that_changed_places_back():
    # with this seed the rounds alone end with clusters [0, 2, 1, 3, 4] in the places of 0 to 4
    rng = chance(96)
    rows, begin = unit_rows(rng, 40, 3), unit_rows(rng, 5, 3)
    found = refit(rows, begin)
    assert align_centroids(begin, found.centroids).tolist() == [0, 1, 2, 3, 4]
    assert found.cohesion == pytest.approx((rows * found.centroids[found.labels]).sum() / 40, abs=1e-7)


def test_refit_takes_one_round_where_asked():
    rows = unit_rows(chance(3), 60, 6)
    once = refit(rows, rows[:4], max_rounds=1)
    labels = balanced_assignment(rows @ rows[:4].T, 15)
    np.testing.assert_allclose(sorted(once.centroids.tolist()), sorted(centroids_of(rows, labels, 4).tolist()))


@pytest.mark.parametrize(
    ("rows", "centroids", "problem"),
    [
        (np.eye(3)[:2], np.eye(3), "2 rows cannot make 3 clusters"),
        (np.eye(3), np.eye(2), "rows of 3 dimensions cannot move centroids of 2"),
        (np.eye(3), 2 * np.eye(3), "centroid 0 has length 2, not 1"),
        (np.zeros((3, 3)), np.eye(3), "row 0 has length 0, not 1"),
    ],
)
def test_impossible_refits_are_refused(rows, centroids, problem):
    with pytest.raises(InputError, match=problem):
        refit(rows, centroids)


def test_centroids_of_groups_are_the_directions_of_their_sums():
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    np.testing.assert_allclose(centroids_of(rows, np.array([1, 1, 0]), 2), [[0.6, 0.8], [0.5**0.5, 0.5**0.5]])


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([0, 0, 2], "the rows of cluster 1 are none or cancel out"),
        ([0, 1, 3], "whole numbers from 0 to 2"),
        ([0, 1, -1], "whole numbers from 0 to 2"),
        ([0, 1], "labels must be 3"),
    ],
)
def test_groups_without_a_direction_are_refused(labels, problem):
    with pytest.raises(InputError, match=problem):
        centroids_of(np.eye(3), np.array(labels), 3)


# --- alignment ----------------------------------------------------------------------------------------


def test_alignment_undoes_any_permutation():
    current = unit_rows(chance(), 4, 6)
    for order in permutations(range(4)):
        shuffled = current[list(order)]
        np.testing.assert_array_equal(shuffled[align_centroids(current, shuffled)], current)


def test_alignment_is_the_best_of_all_orders():
    rng = chance(1)
    current, new = unit_rows(rng, 5, 3), unit_rows(rng, 5, 3)
    best = max(permutations(range(5)), key=lambda order: (current * new[list(order)]).sum())
    assert align_centroids(current, new).tolist() == list(best)


def test_alignment_of_different_shapes_is_refused():
    with pytest.raises(InputError, match=r"\(3, 2\) cannot take the place of \(2, 2\)"):
        align_centroids(np.zeros((2, 2)), np.zeros((3, 2)))
