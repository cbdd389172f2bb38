from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from coterie.clustering import assignment, balanced_assignment
from coterie.clustering.assignment import EqualShares
from coterie.errors import InputError

COSINES = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(-1, 1)


@st.composite
def problems(draw, most_rows, most_clusters):
    rows, clusters = draw(st.integers(1, most_rows)), draw(st.integers(1, most_clusters))
    capacity = -(-rows // clusters) + draw(st.integers(0, 2))
    return draw(arrays(np.float64, (rows, clusters), elements=COSINES)), capacity


@st.composite
def drifting_problems(draw):
    """Similarities of the same rows in several rounds, some alike, some not."""
    rows, clusters = draw(st.integers(1, 30)), draw(st.integers(1, 6))
    first = draw(arrays(np.float64, (rows, clusters), elements=COSINES))
    steps = draw(st.lists(st.sampled_from([0.01, 0.3, 2.0]), min_size=1, max_size=4))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [first, *(first + step * noise.uniform(-1, 1, first.shape) for step in steps)]


def total(similarity, labels):
    return similarity[np.arange(len(labels)), labels].sum()


def best_by_enumeration(similarity, capacity):
    rows, clusters = similarity.shape
    allowed = (labels for labels in product(range(clusters), repeat=rows) if np.bincount(labels).max() <= capacity)
    return max(total(similarity, np.array(labels)) for labels in allowed)


def best_by_hungarian(similarity, capacity):
    slots = np.repeat(similarity, capacity, axis=1)
    return slots[linear_sum_assignment(slots, maximize=True)].sum()


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
    assert np.bincount(labels).max() <= capacity
    assert total(similarity, labels) == pytest.approx(best_by_hungarian(similarity, capacity), abs=1e-9)


@pytest.mark.parametrize("pull", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("capacity", [24, 25, 60])
def test_assignment_of_hundreds_of_skewed_rows_is_optimal(pull, capacity):
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(240, 12)) + pull  # the larger the pull, the more rows want the same clusters
    similarity = rows @ rows[:10].T / 100
    labels = balanced_assignment(similarity, capacity)
    assert np.bincount(labels, minlength=10).max() <= capacity
    assert total(similarity, labels) == pytest.approx(best_by_hungarian(similarity, capacity), abs=1e-8)


@settings(max_examples=50)
@given(drifting_problems())
def test_warm_and_cold_assignments_are_equally_good(rounds):
    warm = EqualShares(rounds[0].shape[1])
    for similarity in rounds:
        rows, clusters = similarity.shape
        capacity = -(-rows // clusters)
        labels = warm(similarity)
        assert np.bincount(labels).max() <= capacity
        cold = balanced_assignment(similarity, capacity)
        assert total(similarity, labels) == pytest.approx(total(similarity, cold), abs=1e-9)


@settings(max_examples=50)
@given(problems(most_rows=12, most_clusters=4), st.randoms(use_true_random=False))
def test_the_order_of_rows_and_of_clusters_does_not_change_the_total(problem, random):
    similarity, capacity = problem
    rows, clusters = (random.sample(range(n), n) for n in similarity.shape)
    shuffled = similarity[rows][:, clusters]
    labels = balanced_assignment(shuffled, capacity)
    expected = total(similarity, balanced_assignment(similarity, capacity))
    assert total(shuffled, labels) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=50)
@given(problems(most_rows=30, most_clusters=5))
def test_the_bound_costs_similarity_and_never_gains_any(problem):
    similarity, capacity = problem
    nearest = similarity.max(axis=1).sum()
    assert total(similarity, balanced_assignment(similarity, capacity)) <= nearest + 1e-9
    free = balanced_assignment(similarity, len(similarity))
    assert total(similarity, free) == pytest.approx(nearest, abs=1e-9)


def test_assignment_by_hand():
    # all three prefer cluster 0, which holds two; moving row 1 costs least: 0.9 - 0.8
    similarity = np.array([[0.9, 0.1], [0.9, 0.8], [0.9, 0.5]])
    assert balanced_assignment(similarity, 2).tolist() == [0, 1, 0]


def test_a_chain_of_moves_beats_the_direct_one():
    # clusters hold one row each. Row 1 -> cluster 2 directly costs 0.9; row 1 -> 1 and row 2 -> 2 cost 0.1 each.
    similarity = np.array([[0.9, 0.0, 0.0], [0.9, 0.8, 0.0], [0.0, 0.9, 0.8]])
    assert balanced_assignment(similarity, 1).tolist() == [0, 1, 2]


def test_a_long_chain_is_found():
    # row 0 and a rival both want cluster 0, and only the last cluster has room: for the rival it would cost 1.2
    # to go there; for each other row it costs 0.1 to step aside by one, 0.6 in all
    similarity = np.full((7, 7), -1.0)
    for i in range(6):
        similarity[i, i], similarity[i, i + 1] = 0.9, 0.8
    similarity[6, 0], similarity[6, 6] = 1.0, -0.2
    assert balanced_assignment(similarity, 1).tolist() == [1, 2, 3, 4, 5, 6, 0]


def test_identical_rows_are_divided_in_full_shares():
    assert np.bincount(balanced_assignment(np.ones((7, 3)), 3), minlength=3).max() == 3


def test_prices_of_an_earlier_round_do_not_bind_a_later_one():
    # at first all rows want cluster 0, which becomes expensive; then two want 0 and one wants 1, and all get it
    warm = EqualShares(2)
    assert np.bincount(warm(np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.5]]))).tolist() == [2, 1]
    assert warm(np.array([[0.1, 0.0], [0.0, 0.1], [0.1, 0.0]])).tolist() == [0, 1, 0]


@pytest.fixture
def paths(monkeypatch):
    """The cheapest paths that are searched."""
    found = []
    search = assignment._Assignment._cheapest_path

    def recorded(self, sources, sinks):
        found.append(search(self, sources, sinks))
        return found[-1]

    monkeypatch.setattr(assignment._Assignment, "_cheapest_path", recorded)
    return found


def test_bids_and_kept_prices_leave_few_paths(paths):
    rows = np.random.default_rng(7).normal(size=(2000, 12)) + 0.3
    similarity = rows @ rows[:10].T / 100
    surplus = np.maximum(np.bincount(similarity.argmax(axis=1), minlength=10) - 200, 0).sum()
    warm = EqualShares(10)
    warm(similarity)
    assert len(paths) < surplus / 4
    paths.clear()
    warm(similarity)
    assert len(paths) < 10  # K - 1 rows are as well off in another cluster: those that hold the prices


def test_a_capacity_beyond_need_takes_no_memory():
    assert balanced_assignment(np.eye(3), 1 << 40).tolist() == [0, 1, 2]


def test_single_precision_similarities_are_taken():
    similarity = np.random.default_rng(0).random((40, 4), dtype=np.float32)
    assert total(similarity, balanced_assignment(similarity, 10)) == pytest.approx(best_by_hungarian(similarity, 10))


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


def test_the_largest_similarities_do_not_overflow():
    rng = np.random.default_rng(3)
    similarity = rng.choice([-1000.0, 1000.0], size=(90, 9)) * rng.random((90, 9))
    assert total(similarity, balanced_assignment(similarity, 10)) == pytest.approx(best_by_hungarian(similarity, 10))
