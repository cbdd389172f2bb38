"""The arithmetic of `counting`, in numpy."""

from __future__ import annotations

import binascii
from math import sqrt

import numpy as np
import numpy.typing as npt

from coterie.counting.arrays import Counts, Floats, Row, Sums

UNIT = 2.0**-20
LEAST = -60.0
"""What is next to nothing stays clear of subnormal numbers, which take ten times as long."""


class NumpyKernel:
    """See `Kernel`."""

    name = "numpy"

    def conserves(self, counts: Counts, each: int, most: int) -> bool:
        """See `Kernel.conserves`."""
        if counts.dtype.itemsize <= 2 and counts.shape[-1] <= 256:
            # below 2^24 all whole numbers are float32 as well, and this takes a third of the time
            sums = counts.astype(np.float32) @ np.ones(counts.shape[-1], np.float32)
        else:
            sums = counts.sum(axis=-1, dtype=np.uint64)
        return bool((sums == each).all()) and int(counts.max()) <= most

    def from_base64(self, text: bytes, size: int) -> npt.NDArray[np.uint8] | None:
        """See `Kernel.from_base64`."""
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error:
            return None
        return np.frombuffer(data, np.uint8) if len(data) == size else None

    def usage(self, counts: Counts, covered: int, most: float) -> Floats:
        """See `Kernel.usage`."""
        usage: Floats = counts.ravel().astype(np.float32)
        usage /= np.float32(covered)
        return np.minimum(usage, np.float32(most), out=usage)

    def similarity(self, layers: Sums, weights: Floats | None) -> NumpySimilarity:
        """See `Kernel.similarity`."""
        return NumpySimilarity(layers, weights)

    def row(self, usage: Floats) -> Row:
        """See `Kernel.row`."""
        return np.rint(np.log1p(-usage) * np.float32(1 / UNIT)).astype(np.int32)

    def blend(self, mean: Floats, usage: Floats, requests: int) -> None:
        """See `Kernel.blend`."""
        mean += (usage - mean) / np.float32(requests)

    def batches(self, count: int, pairs: int) -> NumpyBatches:
        """See `Kernel.batches`."""
        return NumpyBatches(self, count, pairs)


class NumpySimilarity:
    """See `Similarity`."""

    def __init__(self, layers: Sums, weights: Floats | None) -> None:
        self._layers = layers
        self._weights = weights

    def __call__(self, counts: Counts, vectors: Floats) -> tuple[npt.NDArray[np.float64], float]:
        """See `Similarity`."""
        features = counts[self._layers].astype(np.float32)
        if self._weights is not None:
            features *= self._weights
        features = features.ravel()
        return (vectors @ features).astype(np.float64), sqrt(features.dot(features))


class NumpyBatches:
    """See `Batches`."""

    def __init__(self, kernel: NumpyKernel, count: int, pairs: int) -> None:
        self._kernel = kernel
        self.sums = np.zeros((count, pairs), np.int64)
        self._means = np.zeros((count, pairs), np.float32)
        self._log_idle = np.zeros((count, pairs), np.float32)  # log(1 - mean)
        self._alike = np.ones((count, pairs), np.float32)

    def join(self, batch: int, usage: Floats, requests: int) -> tuple[Row, float]:
        """See `Batches.join`."""
        row, mean = self._kernel.row(usage), self._means[batch]
        self._kernel.blend(mean, usage, requests)
        np.log1p(-mean, out=self._log_idle[batch])
        return row, self.grow(batch, row)

    def grow(self, batch: int, by: Row | Sums, sign: int = 1) -> float:
        """See `Batches.grow`."""
        sums = self.sums[batch]
        (np.add if sign > 0 else np.subtract)(sums, by, out=sums)
        return float(_exp((sums * UNIT).astype(np.float32)).sum(dtype=np.float64))

    def compose(self, batch: int, share: float, weight: float) -> None:
        """See `Batches.compose`."""
        alike = self._alike[batch]
        np.multiply(self.sums[batch], UNIT, out=alike, casting="unsafe")
        alike += np.float32(weight) * self._log_idle[batch]
        alike *= np.float32(share)
        _exp(alike)

    def products(self, usage: Floats) -> npt.NDArray[np.float64]:
        """See `Batches.products`."""
        # einsum and not @: BLAS rounds by position
        products: npt.NDArray[np.float64] = np.einsum("ge,e->g", self._alike, usage).astype(np.float64)
        return products


def _exp(logarithms: Floats) -> Floats:
    """Exponentials in place."""
    np.maximum(logarithms, np.float32(LEAST), out=logarithms)
    return np.exp(logarithms, out=logarithms)
