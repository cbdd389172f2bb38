"""Products in tiles of fixed shape, so that a row's bits do not depend on the rows computed with it.

BLAS picks its kernel, its blocking and with them the order of additions by the shape of a product.  A row
multiplied alone and the same row multiplied among 31 others therefore differ in their last bits, and a greedy
decoder turns such a bit into another word.  Here the shape never changes: rows are cut into tiles of fixed
height, the last one padded with zeros, and every product of a weight matrix is one of `tile @ block`.

What is left to BLAS is that equal rows of *one* product give equal bits whatever their place in the tile.  For
products of 4 and of 8 rows that holds with the kernels of OpenBLAS on x86; for 12 and more it does not with those for
AVX2.  It is checked on the machine at hand by `check_rows`, once for each shape that a model uses.  Where `same_bits`
finds that another height gives the same bits too, it may be used as well: the order of additions does not depend on the
numbers, so a few random ones show it.

Weights are stored as `[blocks, K, width]`: the columns of a `[K, N]` matrix in blocks, each contiguous, the last
one padded with zeros.  Narrow blocks keep a product under 100^3 multiplications, up to which OpenBLAS multiplies
in place instead of copying the weights to a buffer first (`sgemm_small_matrix_permit` in its sources).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt

from coterie.errors import UnsupportedError

Floats = npt.NDArray[np.float32]

ROWS = 8
"""Tokens of a tile of a dense product."""
WIDTH = 256
"""Columns of a block of a dense matrix, at most."""

Shape = tuple[int, int, int]
"""Rows, inner dimension and columns of one product."""


def block_columns(matrix: Floats, width: int) -> Floats:
    """Cut a matrix `[K, N]` into contiguous blocks of columns `[ceil(N / width), K, width]`, padded with zeros."""
    inner, columns = matrix.shape
    blocks = -(-columns // width)
    padded = np.zeros((inner, blocks * width), np.float32)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(inner, blocks, width).swapaxes(0, 1))


def width_of(columns: int) -> int:
    """Width of the blocks in which a matrix of so many columns is stored: `WIDTH`, or less for a narrow one."""
    return min(WIDTH, -(-columns // 16) * 16)


def product(rows: Floats, blocks: Floats, columns: int) -> Floats:
    """Multiply `rows [T, K]` by a matrix stored as `blocks [B, K, width]`.

    Returns:
        `[T, columns]`; a row's bits depend on that row alone.
    """
    tiles = into_tiles(rows, ROWS)
    count, _, width = blocks.shape
    result = np.empty((len(tiles), ROWS, count, width), np.float32)
    np.matmul(tiles[:, None], blocks, out=result.swapaxes(1, 2))
    return result.reshape(-1, count * width)[: len(rows), :columns]


def product_by_head(rows: Floats, matrices: Floats) -> Floats:
    """Multiply each head's `rows [T, H, K]` by its own matrix of `[H, K, N]`.

    Returns:
        `[T, H, N]`; a row's bits depend on that row alone.
    """
    tokens, heads, inner = rows.shape
    tiles = into_tiles(rows.reshape(tokens, heads * inner), ROWS).reshape(-1, ROWS, heads, inner)
    result = np.empty((len(tiles), ROWS, heads, matrices.shape[2]), np.float32)
    np.matmul(tiles.swapaxes(1, 2), matrices, out=result.swapaxes(1, 2))
    return result.reshape(-1, heads, matrices.shape[2])[:tokens]


def into_tiles(rows: Floats, height: int) -> Floats:
    """Cut `rows [T, K]` into tiles `[ceil(T / height), height, K]`, the last one padded with zeros."""
    count, inner = rows.shape
    if count % height == 0:
        return np.ascontiguousarray(rows).reshape(-1, height, inner)
    tiles = -(-count // height)
    padded = np.zeros((tiles * height, inner), np.float32)
    padded[:count] = rows
    return padded.reshape(tiles, height, inner)


def check_rows(shapes: Iterable[Shape]) -> None:
    """Check that equal rows give equal bits in every row of a product, for each of these shapes.

    Raises:
        UnsupportedError: they do not, with this machine's BLAS: outputs would depend on what else is computed.
    """
    for rows, inner, columns in sorted(set(shapes)):
        if not same_bits(rows, rows, inner, columns):
            raise UnsupportedError(
                f"numpy's BLAS gives equal rows of a {rows} x {inner} x {columns} product unequal bits, so outputs "
                "would depend on which requests run together; use a numpy built with OpenBLAS, with "
                "OPENBLAS_NUM_THREADS=1"
            )


@cache
def same_bits(one: int, other: int, inner: int, columns: int) -> bool:
    """Whether equal rows give equal bits in every row of products of two heights, matrix transposed or not."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal(inner, dtype=np.float32)
    matrix = rng.standard_normal((inner, columns), dtype=np.float32)
    for operand in (matrix, np.ascontiguousarray(matrix.T).T):
        results = [np.tile(row, (height, 1)) @ operand for height in (one, other)]
        if not all((result == results[0][0]).all() for result in results):
            return False
    return True
