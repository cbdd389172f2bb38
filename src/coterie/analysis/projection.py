"""Signatures in two dimensions, for a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.analysis.correlation import Floats
from coterie.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """The first two principal components.

    Attributes:
        points: `[N, 2]` coordinates of the rows.
        centroids: `[K, 2]` coordinates of the centroids.
        explained: share of the rows' variance along each axis.
    """

    points: Floats
    centroids: Floats
    explained: tuple[float, float]


def project(rows: npt.NDArray[np.floating[Any]], centroids: npt.NDArray[np.floating[Any]]) -> Projection:
    """Principal components of the rows, by singular value decomposition of the centred rows.

    The sign of an axis is arbitrary; here the entry of largest magnitude is positive, so that the same rows
    give the same picture.  An axis along which the rows do not differ has coordinates 0.

    Args:
        rows: `[N, D]`, N >= 1.  The cost grows as N^2 * D; two thousand rows are plenty for a plot.
        centroids: `[K, D]`, placed by the axes of the rows.

    Raises:
        InputError: no rows, or other dimensions.
    """
    if rows.ndim != 2 or not len(rows) or centroids.ndim != 2 or rows.shape[1] != centroids.shape[1]:
        raise InputError(f"projection: rows {rows.shape} and centroids {centroids.shape} are not (N, D) and (K, D)")
    mean = rows.mean(axis=0, dtype=np.float64)
    centred = rows - mean
    axes, strengths = _axes(centred, flat=1e-9 * float(np.linalg.norm(rows)))
    total = float(np.einsum("nd,nd->", centred, centred))
    first, second = (float(s**2) / total if total > 0 else 0.0 for s in strengths)
    return Projection(centred @ axes.T, (centroids - mean) @ axes.T, (first, second))


def _axes(centred: Floats, flat: float) -> tuple[Floats, Floats]:
    """`[2, D]` axes and `[2]` singular values; zeros where no more than rounding errors are left of the rows."""
    _, values, vectors = np.linalg.svd(centred, full_matrices=False)
    axes, strengths = np.zeros((2, centred.shape[1])), np.zeros(2)
    spanned = min(2, int((values > flat).sum()))
    axes[:spanned], strengths[:spanned] = vectors[:spanned], values[:spanned]
    peaks = axes[np.arange(2), np.abs(axes).argmax(axis=1)]
    return axes * np.where(peaks < 0, -1.0, 1.0)[:, None], strengths
