"""The arithmetic of `counting`, compiled: `kernel.c`, built when coterie is installed, and called by ctypes."""

from __future__ import annotations

import ctypes
from math import sqrt
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from coterie.counting.arrays import Counts, Floats, Row, Sums
from coterie.counting.numpy_kernel import NumpyKernel, NumpySimilarity
from coterie.native import Functions, open_library

_INTERFACE = 2  # as coterie_interface in kernel.c
_SIZE, _FLOAT, _ARRAY = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_FUNCTIONS: Functions = {
    "coterie_conserves": (ctypes.c_int, (_ARRAY, *[_SIZE] * 3, *[ctypes.c_uint64] * 2)),
    "coterie_base64": (ctypes.c_int, (_ARRAY, _SIZE, _ARRAY, _SIZE)),
    "coterie_usage": (None, (_ARRAY, _SIZE, _SIZE, _FLOAT, _FLOAT, _ARRAY)),
    "coterie_row": (None, (_ARRAY, _SIZE, _ARRAY)),
    "coterie_blend": (None, (_ARRAY, _ARRAY, _SIZE, _FLOAT)),
    "coterie_grow": (ctypes.c_double, (_ARRAY, _ARRAY, _SIZE, _SIZE)),
    "coterie_similar": (
        ctypes.c_double,
        (_ARRAY, _SIZE, _ARRAY, _SIZE, _SIZE, _ARRAY, _ARRAY, _ARRAY, _SIZE, _ARRAY),
    ),
    "coterie_join": (ctypes.c_double, (_ARRAY, _SIZE, *[_ARRAY] * 3, _FLOAT, _ARRAY)),
    "coterie_compose": (None, (*[_ARRAY] * 3, _SIZE, _FLOAT, _FLOAT)),
    "coterie_products": (None, (_ARRAY, _SIZE, _ARRAY, _SIZE, _ARRAY)),
}


_NATIVE = frozenset(map(np.dtype, ("u1", "u2", "u4")))
"""Counts of others, which no engine sends, are left to numpy."""

_plain = NumpyKernel()


def load_native(level: str) -> NativeKernel | None:
    """The kernel of one of `LEVELS`; None if it was not built, or this processor lacks the instructions."""
    functions = open_library(Path(__file__).parent, level, _INTERFACE, _FUNCTIONS)
    return None if functions is None else NativeKernel(functions, level)


class NativeKernel:
    """See `Kernel`.

    Args:
        functions: the library.
        level: what it was compiled for.
    """

    def __init__(self, functions: ctypes.CDLL, level: str) -> None:
        self.name = f"native {level}"
        self._functions = functions
        self._conserves = functions.coterie_conserves
        self._usage = functions.coterie_usage

    def conserves(self, counts: Counts, each: int, most: int) -> bool:
        """See `Kernel.conserves`."""
        if counts.dtype not in _NATIVE or each >> 63:
            return _plain.conserves(counts, each, most)
        counts = np.ascontiguousarray(counts)
        layers, experts = counts.shape
        return bool(self._conserves(_address(counts), counts.itemsize, layers, experts, each, most))

    def from_base64(self, text: bytes, size: int) -> npt.NDArray[np.uint8] | None:
        """See `Kernel.from_base64`."""
        data = np.empty(size, np.uint8)
        return data if self._functions.coterie_base64(text, len(text), _address(data), size) else None

    def usage(self, counts: Counts, covered: int, most: float) -> Floats:
        """See `Kernel.usage`."""
        if counts.dtype not in _NATIVE:
            return _plain.usage(counts, covered, most)
        counts = np.ascontiguousarray(counts)
        usage = np.empty(counts.size, np.float32)
        self._usage(_address(counts), counts.itemsize, counts.size, covered, most, _address(usage))
        return usage

    def similarity(self, layers: Sums, weights: Floats | None) -> NativeSimilarity:
        """See `Kernel.similarity`."""
        return NativeSimilarity(self._functions, layers, weights)

    def row(self, usage: Floats) -> Row:
        """See `Kernel.row`."""
        row = np.empty(len(usage), np.int32)
        self._functions.coterie_row(_address(usage), len(usage), _address(row))
        return row

    def blend(self, mean: Floats, usage: Floats, requests: int) -> None:
        """See `Kernel.blend`."""
        self._functions.coterie_blend(_address(mean), _address(usage), len(mean), requests)

    def batches(self, count: int, pairs: int) -> NativeBatches:
        """See `Kernel.batches`."""
        return NativeBatches(self._functions, count, pairs)


class NativeSimilarity:
    """See `Similarity`."""

    def __init__(self, functions: ctypes.CDLL, layers: Sums, weights: Floats | None) -> None:
        self._functions, self._call = functions, functions.coterie_similar
        self._plain = NumpySimilarity(layers, weights)
        self._kept = layers, weights  # as long as their addresses
        self._layers = _address(layers), len(layers)
        self._weights = None if weights is None else _address(weights)
        self._vectors: Floats | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeSimilarity:
        """Another, for addresses and functions cannot be copied."""
        return NativeSimilarity(self._functions, *self._kept)

    def __call__(self, counts: Counts, vectors: Floats) -> tuple[npt.NDArray[np.float64], float]:
        """See `Similarity`."""
        if counts.dtype not in _NATIVE:
            return self._plain(counts, vectors)
        if vectors is not self._vectors:
            self._use(vectors)
        counts = np.ascontiguousarray(counts)
        squares: float = self._call(
            *(_address(counts), counts.itemsize, *self._layers, counts.shape[-1], self._weights), *self._places
        )
        return self._products.copy(), sqrt(squares)

    def _use(self, vectors: Floats) -> None:
        """Look up where these vectors are, and make room for what is computed with them."""
        self._vectors, self._used = vectors, np.ascontiguousarray(vectors, np.float32)
        self._features, self._products = np.empty(vectors.shape[1], np.float32), np.empty(len(vectors))
        self._places = _address(self._features), _address(self._used), len(vectors), _address(self._products)


class NativeBatches:
    """See `Batches`."""

    def __init__(self, functions: ctypes.CDLL, count: int, pairs: int) -> None:
        self._functions = functions
        self._join, self._grow = functions.coterie_join, functions.coterie_grow
        self._compose, self._multiply = functions.coterie_compose, functions.coterie_products
        self._pairs = pairs
        self._count = count
        self.sums = np.zeros((count, pairs), np.int64)
        self._means = np.zeros((count, pairs), np.float32)
        self._log_idle = np.zeros((count, pairs), np.float32)  # log(1 - mean)
        self._alike = np.ones((count, pairs), np.float32)
        self._products = np.empty(count)
        self._nothing = np.zeros(pairs, np.int32)
        # looked up once: to ask an array takes longer than to compute
        self._sums_at = _address(self.sums)
        self._means_at = _address(self._means)
        self._log_idle_at = _address(self._log_idle)
        self._alike_at = _address(self._alike)
        self._products_at = _address(self._products)
        self._nothing_at = _address(self._nothing)

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeBatches:
        """Another with the same contents, at addresses of its own."""
        other = NativeBatches(self._functions, self._count, self._pairs)
        for name in ("sums", "_means", "_log_idle", "_alike"):
            getattr(other, name)[...] = getattr(self, name)
        return other

    def join(self, batch: int, usage: Floats, requests: int) -> tuple[Row, float]:
        """See `Batches.join`."""
        start, pairs = self._pairs * batch, self._pairs
        row = np.empty(pairs, np.int32)
        places = _address(row), self._means_at + 4 * start, self._log_idle_at + 4 * start
        idle: float = self._join(_address(usage), pairs, *places, requests, self._sums_at + 8 * start)
        return row, idle

    def grow(self, batch: int, by: Row | Sums, sign: int = 1) -> float:
        """See `Batches.grow`."""
        row = self._nothing_at
        if by.dtype == np.int32:
            row = _address(by)
        else:
            self.sums[batch] += sign * by
        idle: float = self._grow(self._sums_at + 8 * self._pairs * batch, row, self._pairs, sign)
        return idle

    def compose(self, batch: int, share: float, weight: float) -> None:
        """See `Batches.compose`."""
        start = self._pairs * batch
        places = self._alike_at + 4 * start, self._sums_at + 8 * start, self._log_idle_at + 4 * start
        self._compose(*places, self._pairs, share, weight)

    def products(self, usage: Floats) -> npt.NDArray[np.float64]:
        """See `Batches.products`."""
        self._multiply(self._alike_at, self._count, _address(usage), self._pairs, self._products_at)
        return self._products.copy()


def _address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array that is not empty lies."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(cast("Any", array)))
    except TypeError:  # it is not to be written to; this takes five times as long
        assert array.flags.c_contiguous
        address: int = array.ctypes.data
        return address
