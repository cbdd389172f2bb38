"""Products whose rows do not depend on one another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import UnsupportedError
from coterie.modeling import tiles
from coterie.modeling.tiles import block_columns, check_rows, product, product_by_head, width_of


def floats(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("columns", [1, 16, 100, 256, 257, 600])
def test_a_product_is_that_of_the_whole_matrices(columns):
    rng = np.random.default_rng(columns)
    rows, matrix = floats(rng, 21, 40), floats(rng, 40, columns)
    result = product(rows, block_columns(matrix, width_of(columns)), columns)
    np.testing.assert_allclose(result, rows.astype(float) @ matrix.astype(float), atol=1e-4)


def test_each_head_is_multiplied_by_its_own_matrix():
    rng = np.random.default_rng(0)
    rows, matrices = floats(rng, 19, 3, 8), floats(rng, 3, 8, 5)
    np.testing.assert_allclose(product_by_head(rows, matrices), np.einsum("thk,hkn->thn", rows, matrices), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.sampled_from([24, 64, 128]), st.sampled_from([16, 200, 300]))
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(seed, count, inner, columns):
    rng = np.random.default_rng(seed)
    rows, blocks = floats(rng, count, inner), block_columns(floats(rng, inner, columns), width_of(columns))
    together = product(rows, blocks, columns)
    chosen = rng.permutation(count)[: rng.integers(1, count + 1)]
    np.testing.assert_array_equal(product(rows[chosen], blocks, columns), together[chosen])


def test_no_rows_give_no_rows():
    assert product(np.empty((0, 8), np.float32), np.ones((1, 8, 16), np.float32), 16).shape == (0, 16)


def test_this_machine_gives_equal_rows_equal_bits():
    check_rows([(8, 128, 256), (4, 64, 128), (8, 32, 64), (8, 2048, 256)])


def test_a_blas_that_treats_rows_unequally_is_refused(monkeypatch):
    tiles.same_bits.cache_clear()
    monkeypatch.setattr(tiles.np, "tile", lambda row, _: np.stack([row, row * np.float32(1.0001)]))
    with pytest.raises(UnsupportedError, match="equal rows of a 2 x 8 x 4 product unequal bits"):
        check_rows([(2, 8, 4)])
    tiles.same_bits.cache_clear()
