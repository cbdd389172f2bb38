from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.clustering import exact
from coterie.clustering.exact import UnitRows, directions

GRID = 1 << 26


def unit_rows(seed, rows, dimensions, dtype=np.float64):
    drawn = np.random.default_rng(seed).normal(size=(rows, dimensions))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(dtype)


def on_grid(vector):
    return [Fraction(round(Fraction(float(value)) * GRID), GRID) for value in vector]


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([np.float32, np.float64]))
def test_cosines_equal_the_fractions_of_the_grid_values(seed, dimensions, dtype):
    rows, vectors = unit_rows(seed, 3, dimensions, dtype), unit_rows(seed + 1, 2, dimensions)
    expected = [
        [float(sum(a * b for a, b in zip(on_grid(row), on_grid(vector), strict=True))) for vector in vectors]
        for row in rows
    ]
    assert UnitRows("row", rows).cosines(vectors).tolist() == expected


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_sums_equal_the_fractions_of_the_grid_values(seed, rows):
    points = unit_rows(seed, rows, 3)
    weights = np.random.default_rng(seed).integers(-1, 2, size=(rows, 2))
    expected = [
        [float(sum(int(w) * on_grid(row)[d] for w, row in zip(column, points, strict=True))) for d in range(3)]
        for column in weights.T
    ]
    assert UnitRows("row", points).sums(weights, np.arange(rows)).tolist() == expected


def test_no_order_of_additions_changes_a_bit(monkeypatch):
    rows, vectors = unit_rows(0, 50, 300, np.float32), unit_rows(1, 9, 300)
    order = np.random.default_rng(2).permutation(300)
    cosines = UnitRows("row", rows).cosines(vectors)
    assert UnitRows("row", rows[:, order]).cosines(vectors[:, order]).tobytes() == cosines.tobytes()
    assert UnitRows("row", rows).cosines(vectors[4:5]).tobytes() == cosines[:, 4:5].tobytes()
    everything = np.ones((50, 1), dtype=np.int8)
    sums = UnitRows("row", rows).sums(everything, np.arange(50))
    monkeypatch.setattr(exact, "_KEPT_BYTES", 0)
    monkeypatch.setattr(exact, "_BLOCK_BYTES", 7 * 8 * 300)  # blocks of 7 rows
    assert UnitRows("row", rows).cosines(vectors).tobytes() == cosines.tobytes()
    assert UnitRows("row", rows).sums(everything, np.arange(50)[::-1]).tobytes() == sums.tobytes()


def test_the_grid_moves_cosines_by_no_more_than_single_precision_does():
    rows, vectors = unit_rows(3, 40, 6144, np.float32), unit_rows(4, 8, 6144)
    np.testing.assert_allclose(UnitRows("row", rows).cosines(vectors), rows.astype(float) @ vectors.T, atol=6e-8)


def test_taken_rows_have_length_one():
    slightly_off = unit_rows(5, 4, 6) * 1.0009
    np.testing.assert_allclose(np.linalg.norm(UnitRows("row", slightly_off).take(np.array([2, 0])), axis=1), 1)


def test_directions_exist_where_rows_do_not_cancel_out():
    sums = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 1e-7], [0.0, 1e-5]])
    found, exist = directions(sums, np.array([5, 0, 2, 2]))
    assert exist.tolist() == [True, False, False, True]
    assert found[exist].tolist() == [[0.6, 0.8], [0.0, 1.0]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_later_blocks_are_checked_too(monkeypatch, dtype):
    monkeypatch.setattr(exact, "_BLOCK_BYTES", 3 * 8 * 4)  # blocks of 3 rows
    rows = unit_rows(6, 11, 4, dtype)
    rows[7] *= 2
    with pytest.raises(exact.InputError, match="row 7 has length 2, not 1"):
        UnitRows("row", rows)
