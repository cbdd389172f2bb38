"""Sums and dot products of unit rows that do not depend on the order of additions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError

Floats = npt.NDArray[np.float64]
Vectors = npt.NDArray[np.floating[Any]]

_GRID = float(1 << 26)
_BLOCK_BYTES = 16 << 20  # of a block in float64; BLAS threads that wait for a busy core make many small ones slow
_KEPT_BYTES = 64 << 20  # rows that take no more in float64 are brought to the grid once, not at each reading
_UNIT_TOLERANCE = 1e-3
_FLAT = 1e-6  # vectors whose mean is shorter than this have no common direction


class UnitRows:
    """N unit rows on a grid of 2^-26, as float32 or float64 in the caller's memory.

    A product of two grid values is a multiple of 2^-52, and a partial sum of a dot product of unit vectors is at
    most 1 (Cauchy-Schwarz): 53 bits hold it.  Sums of rows have room for 2^27 rows.  Hence float64 gives every
    sum *exactly*, whatever the order: the number of BLAS threads, the rows or centroids computed beside and the
    order of dimensions change no bit.  What the grid costs is an error of a cosine of about 1e-8, less than that
    of float32 rows.

    The rows are brought to the grid block by block, whenever they are read; of many rows there is no copy.
    """

    def __init__(self, name: str, rows: Vectors) -> None:
        """Check the rows; `name` is what errors call them.

        Raises:
            InputError: they are not `[N, D]` floats, or one is not a unit vector.
        """
        if rows.ndim != 2 or rows.dtype not in (np.float32, np.float64):
            raise InputError(
                f"clustering: {name}s of shape {rows.shape} {rows.dtype} are not (N, D) float32 or float64"
            )
        self._rows = rows
        self._block = max(1, _BLOCK_BYTES // (8 * max(1, rows.shape[1])))
        for first in range(0, len(rows), self._block):
            _check_lengths(name, first, rows[first : first + self._block])
        self._kept: Floats | None = None
        if 8 * rows.size <= _KEPT_BYTES:
            self._kept, self._block = _to_grid(rows), max(1, len(rows))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def dimensions(self) -> int:
        """D."""
        return int(self._rows.shape[1])

    def take(self, positions: npt.NDArray[np.integer[Any]]) -> Floats:
        """`[n, D]`: some rows, brought to length 1."""
        taken = self._gridded(positions)
        return taken / _lengths(taken)

    def cosines(self, directions: Vectors) -> Floats:
        """Dot products with unit vectors, which are brought to the grid too.

        Args:
            directions: `[M, D]`.

        Returns:
            `[N, M]`.
        """
        gridded = _to_grid(directions)
        products = np.empty((len(self), len(directions)))
        for first in range(0, len(self), self._block):
            part = slice(first, first + self._block)
            np.matmul(self._gridded(part), gridded.T, out=products[part])
        products /= _GRID * _GRID
        return products

    def sums(self, weights: npt.NDArray[np.integer[Any]], positions: npt.NDArray[np.integer[Any]]) -> Floats:
        """Weighted sums of rows.

        Args:
            weights: `[n, K]` whole numbers.
            positions: `[n]` rows that they belong to.

        Returns:
            `[K, D]`: for each column of weights the sum of weight times row.
        """
        total = np.zeros((weights.shape[1], self.dimensions))
        for first in range(0, len(positions), self._block):
            part = slice(first, first + self._block)
            total += weights[part].T.astype(np.float64) @ self._gridded(positions[part])
        return total / _GRID

    def _gridded(self, part: slice | npt.NDArray[np.integer[Any]]) -> Floats:
        return _to_grid(self._rows[part]) if self._kept is None else self._kept[part]


def directions(sums: Floats, sizes: npt.NDArray[np.integer[Any]]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Unit vectors of sums of rows.

    Args:
        sums: `[K, D]`.
        sizes: `[K]` how many rows each sums.

    Returns:
        `[K, D]` unit vectors, and `[K]` whether there is one: rows may cancel out, or be none.
    """
    lengths = _lengths(sums)
    exist = lengths[:, 0] > _FLAT * sizes
    return sums / np.where(exist[:, None], lengths, 1), exist


def _lengths(vectors: Vectors) -> Floats:
    """`[n, 1]`, computed without BLAS, whose sums depend on the number of threads."""
    squares: Floats = np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True)
    return np.sqrt(squares)


def _to_grid(rows: Vectors) -> Floats:
    """Rows in units of the grid; scaling by a power of two is exact in either precision."""
    scaled = rows * rows.dtype.type(_GRID)
    return np.rint(scaled, out=scaled).astype(np.float64, copy=False)


def _check_lengths(name: str, first: int, rows: Vectors) -> None:
    lengths = _lengths(rows)[:, 0]
    wrong = np.flatnonzero(~(np.abs(lengths - 1) <= _UNIT_TOLERANCE))  # catches NaN too
    if wrong.size:
        problem = f"has length {lengths[wrong[0]]:.4g}, not 1"
        if not np.isfinite(rows[wrong[0]]).all():
            problem = "holds a value that is not finite"
        raise InputError(f"clustering: {name} {first + wrong[0]} {problem}")
