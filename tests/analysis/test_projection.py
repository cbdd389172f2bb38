import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.analysis.projection import project
from coterie.errors import InputError


def test_points_on_a_line_keep_their_distances_and_have_no_second_coordinate():
    # along (3, 4) / 5, at -5, 0 and 5 from the mean; the axis points to positive y, its largest entry
    found = project(np.array([[3.0, 4.0], [0.0, 0.0], [-3.0, -4.0]]), np.array([[6.0, 8.0]]))
    assert found.points == pytest.approx(np.array([[5, 0], [0, 0], [-5, 0]]))
    assert found.centroids == pytest.approx(np.array([[10, 0]]))
    assert found.explained == (pytest.approx(1), 0)


def test_rows_that_are_all_alike_have_no_extent():
    found = project(np.full((5, 3), 1 / 3, dtype=np.float32), np.zeros((1, 3)))
    assert not found.points.any()
    assert found.explained == (0, 0)


@given(st.integers(0, 2**32 - 1))
def test_the_axes_are_those_of_the_covariance(seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(20, 5)) * [5, 3, 1, 1, 1]
    found = project(rows, rows[:2])
    variances = np.sort(np.linalg.eigvalsh(np.cov(rows.T)))[::-1]
    assert found.points.var(axis=0, ddof=1) == pytest.approx(variances[:2])
    assert found.explained == pytest.approx(variances[:2] / variances.sum())
    assert found.centroids == pytest.approx(found.points[:2])


def test_the_picture_does_not_turn_over_with_the_order_of_rows():
    rng = np.random.default_rng(0)
    rows, order = rng.normal(size=(10, 40)) * np.linspace(1, 3, 40), rng.permutation(10)
    assert project(rows[order], rows).points == pytest.approx(project(rows, rows).points[order])


@pytest.mark.parametrize(("rows", "centroids"), [((0, 3), (1, 3)), ((4, 3), (1, 2)), ((4,), (1, 3))])
def test_other_shapes_are_refused(rows, centroids):
    with pytest.raises(InputError, match="projection"):
        project(np.zeros(rows), np.zeros(centroids))
