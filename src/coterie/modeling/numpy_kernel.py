"""The kernel that needs no compiler: numpy, in tiles of fixed shape."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coterie.modeling.attention import (
    KV_TILE,
    CacheHeads,
    Indices,
    Paging,
    QueryGroup,
    attend,
    decode_group,
    prefill_group,
)
from coterie.modeling.experts import ExpertWeights, dense, routed
from coterie.modeling.gates import Choice
from coterie.modeling.rope import rotate
from coterie.modeling.step import StepBatch
from coterie.modeling.tiles import Floats, Shape, check_rows, product, product_by_head

DECODE_GROUP = 32
"""Decoding requests that go along the cache together: few, so that a tile of each stays in the processor's cache."""


def rms_norm(values: Floats, weight: Floats, eps: float) -> Floats:
    """Root mean square norm, x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv 1910.07467)."""
    mean: Floats = np.square(values).mean(axis=-1, keepdims=True)
    normal: Floats = values * np.reciprocal(np.sqrt(mean + np.float32(eps)))
    return normal * weight


class NumpyKernel:
    """See `kernels.Kernel`."""

    name = "numpy"

    def check(self, shapes: Iterable[Shape]) -> None:
        """As `Kernel.check`."""
        check_rows(shapes)

    def product(self, rows: Floats, blocks: Floats, columns: int) -> Floats:
        """As `Kernel.product`."""
        return product(rows, blocks, columns)

    def product_by_head(self, rows: Floats, matrices: Floats) -> Floats:
        """As `Kernel.product_by_head`."""
        return product_by_head(rows, matrices)

    def rms_norm(self, values: Floats, weight: Floats, eps: float) -> Floats:
        """As `Kernel.rms_norm`."""
        return rms_norm(values, weight, eps)

    def rotate(self, values: Floats, cos: Floats, sin: Floats) -> Floats:
        """As `Kernel.rotate`."""
        return rotate(values, cos, sin)

    def dense(self, rows: Floats, weights: ExpertWeights) -> Floats:
        """As `Kernel.dense`."""
        return dense(rows, weights)

    def routed(self, rows: Floats, choice: Choice, weights: ExpertWeights) -> Floats:
        """As `Kernel.routed`."""
        return routed(rows, choice, weights)

    def attention(self, batch: StepBatch, kv: Floats, heads: CacheHeads, window: int | None) -> TiledAttention:
        """As `Kernel.attention`."""
        return TiledAttention(batch, kv, heads, window)


class TiledAttention:
    """Attention of one step; see `kernels.StepAttention`."""

    def __init__(self, batch: StepBatch, kv: Floats, heads: CacheHeads, window: int | None) -> None:
        _, layers, block_size, _ = kv.shape
        self._paging, self._heads = Paging(layers, block_size), heads
        self._store = self._paging.store(kv)
        positions = np.asarray(batch.positions, np.intp)
        self._groups = [
            *_decode_groups(batch, positions, self._paging, heads, window),
            *_prefill_groups(batch, positions, self._paging, heads, window),
        ]
        requests = max((len(group.tiles[0].units) for group in self._groups), default=0)
        self._room = np.empty((requests, KV_TILE, heads.width), np.float32)

    def __call__(self, queries: Floats, layer: int) -> Floats:
        """As `StepAttention.__call__`."""
        mixed = np.empty((*queries.shape[:3], self._heads.value_dim), np.float32)
        for group in self._groups:
            attend(queries, self._store, layer * self._paging.layer_stride, group, self._heads, self._room, mixed)
        return mixed


def _decode_groups(
    batch: StepBatch, positions: Indices, paging: Paging, heads: CacheHeads, window: int | None
) -> list[QueryGroup]:
    single = [request for request, (_, length) in enumerate(batch.rows) if length == 1]
    single.sort(key=lambda request: -int(positions[batch.rows[request][0]]))
    groups = []
    for first in range(0, len(single), DECODE_GROUP):
        members = single[first : first + DECODE_GROUP]
        tokens = np.array([batch.rows[request][0] for request in members])
        units = [
            paging.units(batch.block_tables[request], int(positions[token]) // KV_TILE + 1)
            for request, token in zip(members, tokens, strict=True)
        ]
        groups.append(decode_group(tokens, positions[tokens], units, heads, window))
    return groups


def _prefill_groups(
    batch: StepBatch, positions: Indices, paging: Paging, heads: CacheHeads, window: int | None
) -> list[QueryGroup]:
    groups = []
    for (start, length), table in zip(batch.rows, batch.block_tables, strict=True):
        if length > 1:
            own = positions[start : start + length]
            units = paging.units(table, int(own[-1]) // KV_TILE + 1)
            groups.append(prefill_group(np.arange(start, start + length), own, units, heads, window))
    return groups
