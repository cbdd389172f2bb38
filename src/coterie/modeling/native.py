"""The compiled kernel: `kernel.c`, built when coterie is installed, and called by ctypes without Python's lock.

Types, shapes and ids are checked here, before each call: the C code trusts them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.modeling.attention import KV_TILE, CacheHeads
from coterie.modeling.experts import BLOCK, ExpertWeights
from coterie.modeling.gates import Choice
from coterie.modeling.step import StepBatch
from coterie.modeling.tiles import Floats, Shape
from coterie.native import Functions, open_library

_INTERFACE = 2  # as coterie_interface in kernel.c
_QUERIES = 64  # as QUERIES in kernel.c
_NO_WINDOW = 1 << 62  # more positions than there can be
_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)

_SIZE, _FLOAT, _ARRAY = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_FUNCTIONS: Functions = {
    "coterie_product": (None, (*[_SIZE] * 4, *[_ARRAY] * 3)),
    "coterie_product_by_head": (None, (*[_SIZE] * 4, *[_ARRAY] * 3)),
    "coterie_norm": (None, (*[_SIZE] * 4, _FLOAT, *[_ARRAY] * 3)),
    "coterie_rotate": (None, (*[_SIZE] * 4, *[_ARRAY] * 4)),
    "coterie_dense": (None, (*[_SIZE] * 3, *[_ARRAY] * 4)),
    "coterie_routed": (None, (*[_SIZE] * 5, *[_ARRAY] * 7, *[_FLOAT] * 2, *[_ARRAY] * 5)),
    "coterie_attend": (None, (_SIZE, *[_ARRAY] * 7)),
}


class _Cache(ctypes.Structure):
    """`Cache` of kernel.c."""

    _fields_ = tuple(
        (name, _SIZE)
        for name in "heads share key_dim value_dim width values block_size block_floats window".split()  # noqa: SIM905
    )


def load_native(level: str) -> NativeKernel | None:
    """The kernel of one of `LEVELS`; None if it was not built, or this processor lacks the instructions."""
    functions = open_library(Path(__file__).parent, level, _INTERFACE, _FUNCTIONS)
    return None if functions is None else NativeKernel(functions, level)


class NativeKernel:
    """Compiled code; see `kernels.Kernel`.

    Args:
        functions: the library.
        level: what it was compiled for.
    """

    def __init__(self, functions: ctypes.CDLL, level: str) -> None:
        self.name = f"native {level}"
        self._functions = functions

    def check(self, shapes: Iterable[Shape]) -> None:
        """Nothing to check: the order of additions does not depend on a product's rows."""

    def product(self, rows: Floats, blocks: Floats, columns: int) -> Floats:
        """As `Kernel.product`."""
        count, inner, width = blocks.shape
        tokens, rows = len(rows), np.ascontiguousarray(rows)
        result = np.empty((tokens, count * width), np.float32)
        self._functions.coterie_product(
            tokens, inner, count, width, _floats(rows, tokens, inner), _floats(blocks), _floats(result)
        )
        return result[:, :columns]

    def product_by_head(self, rows: Floats, matrices: Floats) -> Floats:
        """As `Kernel.product_by_head`."""
        heads, inner, columns = matrices.shape
        tokens, rows = len(rows), np.ascontiguousarray(rows)
        result = np.empty((tokens, heads, columns), np.float32)
        self._functions.coterie_product_by_head(
            tokens, heads, inner, columns, _floats(rows, tokens, heads, inner), _floats(matrices), _floats(result)
        )
        return result

    def rms_norm(self, values: Floats, weight: Floats, eps: float) -> Floats:
        """As `Kernel.rms_norm`."""
        values = _whole_tokens(values)
        tokens, heads, size, distance = _heads(values)
        result = np.empty(values.shape, np.float32)
        self._functions.coterie_norm(
            *(tokens, heads, size, distance, eps, _rows(values), _floats(weight, size), _floats(result))
        )
        return result

    def rotate(self, values: Floats, cos: Floats, sin: Floats) -> Floats:
        """As `Kernel.rotate`."""
        values = _whole_tokens(values)
        tokens, heads, size, distance = _heads(values)
        result, angles = np.empty(values.shape, np.float32), (tokens, 1, size // 2)
        self._functions.coterie_rotate(
            *(tokens, heads, size // 2, distance, _rows(values), _floats(cos, *angles), _floats(sin, *angles)),
            _floats(result),
        )
        return result

    def dense(self, rows: Floats, weights: ExpertWeights) -> Floats:
        """As `Kernel.dense`."""
        _, blocks, _, hidden = weights.down.shape
        tokens = len(rows)
        result = np.empty((tokens, hidden), np.float32)
        self._functions.coterie_dense(
            tokens, hidden, blocks, _floats(rows, tokens, hidden), *_matrices(weights), _floats(result)
        )
        return result

    def routed(self, rows: Floats, choice: Choice, weights: ExpertWeights) -> Floats:
        """As `Kernel.routed`."""
        experts, blocks, _, hidden = weights.down.shape
        tokens, top_k = choice.ids.shape
        pairs = tokens * top_k
        _check_ids(choice.ids, experts)
        result, room = np.empty((tokens, hidden), np.float32), np.empty((2, pairs, hidden), np.float32)
        bounds, places = np.empty(experts + 1, np.int64), np.empty(pairs, np.int64)
        self._functions.coterie_routed(
            *(tokens, top_k, experts, hidden, blocks, _floats(rows, tokens, hidden), _ints(choice.ids)),
            *(_floats(choice.weights, tokens, top_k), *_matrices(weights), *_bounds(weights)),
            *(_ints(bounds), _ints(places), _floats(room[0]), _floats(room[1]), _floats(result)),
        )
        return result

    def attention(self, batch: StepBatch, kv: Floats, heads: CacheHeads, window: int | None) -> NativeAttention:
        """As `Kernel.attention`."""
        return NativeAttention(self._functions, batch, kv, heads, window)


class NativeAttention:
    """Compiled attention of one step; see `kernels.StepAttention`."""

    def __init__(
        self, functions: ctypes.CDLL, batch: StepBatch, kv: Floats, heads: CacheHeads, window: int | None
    ) -> None:
        _, layers, block_size, width = kv.shape
        middle = heads.heads * heads.key_dim
        self._functions, self._heads, self._kv = functions, heads, kv
        self._cache = _Cache(
            *(heads.heads, heads.share, heads.key_dim, heads.value_dim, width, 0 if heads.latent else middle),
            *(block_size, layers * block_size * width, window or _NO_WINDOW),
        )
        self._requests, self._tables = _lay_out(batch)
        self._tokens = len(batch.token_ids)
        rows = max(heads.share, _QUERIES)
        of_row, of_keys = heads.key_dim + KV_TILE + heads.value_dim + 2, heads.key_dim * KV_TILE
        self._room = np.empty(rows * of_row + of_keys, np.float32)

    def __call__(self, queries: Floats, layer: int) -> Floats:
        """As `StepAttention.__call__`."""
        heads = self._heads
        result = np.empty((self._tokens, heads.heads, heads.share, heads.value_dim), np.float32)
        self._functions.coterie_attend(
            *(len(self._requests), ctypes.byref(self._cache), _ints(self._requests), _ints(self._tables)),
            _floats(queries, self._tokens, heads.heads, heads.share, heads.key_dim),
            *(_floats(self._kv) + layer * self._kv.strides[1], _floats(self._room), _floats(result)),
        )
        return result


def _lay_out(batch: StepBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Requests `[n, 4]` (first token, tokens, first position, where its blocks begin), and all blocks in one row."""
    tables = [np.asarray(table, np.int64) for table in batch.block_tables]
    requests = np.empty((len(tables), 4), np.int64)
    requests[:, :2] = batch.rows
    requests[:, 2] = batch.positions[requests[:, 0]]
    requests[:, 3] = np.cumsum([0, *map(len, tables[:-1])])
    return requests, np.concatenate(tables)


def _check_ids(ids: npt.NDArray[np.intp], experts: int) -> None:
    if ids.size and not -1 <= ids.min() <= ids.max() < experts:
        raise ValueError(f"expert ids from {ids.min()} to {ids.max()}, of {experts} experts")


def _matrices(weights: ExpertWeights) -> tuple[int, int]:
    experts, blocks, _, hidden = weights.down.shape
    inward, outward = (experts, blocks, hidden, 2 * BLOCK), (experts, blocks, BLOCK, hidden)
    return _floats(weights.gate_up, *inward), _floats(weights.down, *outward)


def _bounds(weights: ExpertWeights) -> tuple[int, int, float, float]:
    if weights.bounded is None:
        return 0, 0, 0.0, 0.0
    experts, blocks, _, hidden = weights.down.shape
    inward = _floats(weights.bounded.gate_up, experts, blocks, 2 * BLOCK)
    return inward, _floats(weights.bounded.down, experts, hidden), weights.bounded.slope, weights.bounded.limit


def _heads(values: Floats) -> tuple[int, int, int, int]:
    """Tokens, heads, size, and floats from token to token, of `[T, H, size]` or `[T, size]`."""
    tokens, *heads, size = values.shape
    return tokens, math.prod(heads), size, values.strides[0] // values.itemsize


def _whole_tokens(values: Floats) -> Floats:
    """The array, or a copy, in which each token is contiguous."""
    return values if values[:1].flags.c_contiguous else np.ascontiguousarray(values)


def _rows(values: Floats) -> int:
    """Address of an array of whole tokens."""
    return _address(values[:1], _FLOAT32, ())


def _floats(array: Floats, *shape: int) -> int:
    """Address of a contiguous float32 array, of this shape if one is given."""
    return _address(array, _FLOAT32, shape)


def _ints(array: npt.NDArray[np.int64]) -> int:
    """Address of a contiguous int64 array."""
    return _address(array, _INT64, ())


def _address(array: npt.NDArray[np.generic], dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous or (shape and array.shape != shape):
        raise ValueError(f"array {array.shape} of {array.dtype}, not a contiguous one of {dtype} {shape or ''}")
    address: int = array.__array_interface__["data"][0]
    return address
