"""Causal attention over a paged cache, in tiles of fixed shape and in a fixed order.

    score_j = scale * q . k_j;   out = sum_j exp(score_j - m) v_j / sum_j exp(score_j - m),   m = max_j score_j

Keys are taken `KV_TILE` positions at a time, first to last, with the running maximum, sum and output of an online
softmax (arXiv 1805.02867; FlashAttention, arXiv 2205.14135, section 3.1).  A tile in which a row sees nothing leaves
its state as it was, bit for bit: maximum kept, factor exp(0) = 1, nothing but zeros added.  So a row's bits depend on
its own query and on the keys that it sees, not on chunks, cache hits, block size, or other rows.

The cache is `[blocks, layers, block_size, width]`: a block holds all layers of its tokens in one piece of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.modeling.tiles import Floats, Shape, same_bits

KV_TILE = 64
"""Positions of a tile of keys and values."""
QUERY_ROWS = 8
"""Rows of a product of queries: heads that share keys, of one token or of several."""
_LOWEST = np.float32(-1e30)  # below every score, and finite: -inf minus -inf is no number

Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CacheHeads:
    """What the cache holds of a token in a layer.

    Attributes:
        heads: heads of keys and values.
        share: query heads to each of them.
        key_dim: dimensions of a key.
        value_dim: dimensions of a value.
        latent: whether values are the first `value_dim` dimensions of the keys (latent attention); otherwise they
            follow the keys of all heads.
    """

    heads: int
    share: int
    key_dim: int
    value_dim: int
    latent: bool

    @property
    def width(self) -> int:
        """Floats of a token in a layer."""
        return self.heads * self.key_dim + (0 if self.latent else self.heads * self.value_dim)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile of queries: so few as make up whole products."""
        return QUERY_ROWS // math.gcd(self.share, QUERY_ROWS)

    @property
    def lone_height(self) -> int | None:
        """Rows of the products of a token alone, where the machine gives them the same bits; None where it does not."""
        height = QUERY_ROWS if self.tile_tokens == 1 else self.share
        return height if all(same_bits(height, *shape) for shape in self.shapes) else None

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The two products of queries with a tile of keys and values."""
        return (QUERY_ROWS, self.key_dim, KV_TILE), (QUERY_ROWS, KV_TILE, self.value_dim)

    def split(self, tile: Floats) -> tuple[Floats, Floats]:
        """Views of `tile [n, KV_TILE, width]`: keys `[n, heads, 1, key_dim, KV_TILE]`, values `[.., KV_TILE, d]`."""
        middle = self.heads * self.key_dim
        keys = tile[..., :middle].reshape(len(tile), KV_TILE, self.heads, self.key_dim)
        values = tile[..., : self.value_dim] if self.latent else tile[..., middle:]
        values = values.reshape(len(tile), KV_TILE, self.heads, self.value_dim)
        return keys.transpose(0, 2, 3, 1)[:, :, None], values.transpose(0, 2, 1, 3)[:, :, None]


@dataclass(frozen=True, slots=True, eq=False)
class KvTile:
    """One step along the cache, for the queries that reach so far.

    Attributes:
        queries: so many of the group's tiles of queries, from the first.
        units: `[n, pieces]` pieces of the cache that make up the tile, for layer 0; n is `queries`, or 1 where
            all belong to one request.
        visible: `[queries, 1, products, height, KV_TILE]`; None where every row sees all of it.
        stale: `[n, KV_TILE]` positions that hold nothing of the request; None where all do.
    """

    queries: int
    units: Indices
    visible: Mask | None
    stale: Mask | None


@dataclass(frozen=True, slots=True, eq=False)
class QueryGroup:
    """Tiles of queries that go along the cache together.

    Attributes:
        tokens: `[n, q]` the step's tokens in each tile; a tile that is not full repeats its first.
        height: rows of a product; a tile of queries is one or several.
        tiles: steps along the cache, from position 0.
    """

    tokens: Indices
    height: int
    tiles: tuple[KvTile, ...]


@dataclass(frozen=True, slots=True)
class Paging:
    """How positions map to pieces of the cache that are contiguous in one layer.

    Attributes:
        layers: layers of the cache.
        block_size: tokens of a block.
    """

    layers: int
    block_size: int

    @property
    def unit(self) -> int:
        """Tokens of a piece: a block, or a tile's part of it."""
        return min(self.block_size, KV_TILE)

    @property
    def layer_stride(self) -> int:
        """Pieces from one layer of a block to the next."""
        return self.block_size // self.unit

    def store(self, kv: Floats) -> Floats:
        """The cache as pieces `[pieces, unit, width]`."""
        return kv.reshape(-1, self.unit, kv.shape[-1])

    def units(self, block_table: Sequence[int], tiles: int) -> Indices:
        """Pieces of layer 0 for `tiles` tiles of a request: `[tiles, KV_TILE / unit]`; block 0 beyond the table."""
        blocks = np.zeros(-(-tiles * KV_TILE // self.block_size), np.intp)
        known = block_table[: len(blocks)]
        blocks[: len(known)] = known
        first = blocks[:, None] * (self.layers * self.layer_stride)
        pieces = (first + np.arange(self.layer_stride)).ravel()[: tiles * KV_TILE // self.unit]
        return pieces.reshape(tiles, -1)


def decode_group(
    tokens: Indices, positions: Indices, units: Sequence[Indices], heads: CacheHeads, window: int | None
) -> QueryGroup:
    """Requests of one token each.

    Args:
        tokens: `[n]` their tokens in the step, those with the longest context first.
        positions: `[n]` their positions.
        units: of each, `[tiles, pieces]`.
        heads: what the cache holds.
        window: positions that a token sees; None for all.
    """
    height = heads.lone_height
    of_tile = heads.tile_tokens if height is None else 1
    spread, at = (np.repeat(values[:, None], of_tile, axis=1) for values in (tokens, positions))
    height = height or QUERY_ROWS
    tiles = []
    for number in range(len(units[0])):
        count = sum(len(own) > number for own in units)
        own = np.stack([pieces[number] for pieces in units[:count]])
        seen = _seen(at[:count], number, window)
        stale = _beyond(positions[:count] + 1, number)
        tiles.append(_tile(count, own, seen, stale, heads.share, height))
    return QueryGroup(spread, height, tuple(tiles))


def prefill_group(
    tokens: Indices, positions: Indices, units: Indices, heads: CacheHeads, window: int | None
) -> QueryGroup:
    """The tokens of one request: several, at positions that follow one another.

    Args:
        tokens: `[n]` its tokens in the step.
        positions: `[n]` their positions.
        units: `[tiles, pieces]`.
        heads: what the cache holds.
        window: positions that a token sees; None for all.
    """
    of_tile = heads.tile_tokens
    places = np.arange(-(-len(tokens) // of_tile) * of_tile).reshape(-1, of_tile)
    places = np.where(places < len(tokens), places, places[:, :1])[::-1]  # the last see most, so they come first
    at = positions[places]
    tiles = []
    for number in range(len(units)):
        count = int((at.max(axis=1) >= number * KV_TILE).sum())
        seen = _seen(at[:count], number, window)
        stale = _beyond(positions[-1:] + 1, number)
        tiles.append(_tile(count, units[number : number + 1], seen, stale, heads.share, QUERY_ROWS))
    return QueryGroup(tokens[places], QUERY_ROWS, tuple(tiles))


def _tile(count: int, units: Indices, seen: Mask, stale: Mask, share: int, height: int) -> KvTile:
    visible = None if seen.all() else np.repeat(seen, share, axis=1).reshape(count, 1, -1, height, KV_TILE)
    return KvTile(count, units, visible, stale if stale.any() else None)


def _seen(positions: Indices, number: int, window: int | None) -> Mask:
    """Which positions of a tile each token `[n, q]` sees: `[n, q, KV_TILE]`."""
    keys = np.arange(number * KV_TILE, (number + 1) * KV_TILE)
    seen: Mask = keys <= positions[..., None]
    return seen if window is None else seen & (keys > positions[..., None] - window)


def _beyond(lengths: Indices, number: int) -> Mask:
    """Which positions of a tile lie beyond each context `[n]`: `[n, KV_TILE]`."""
    beyond: Mask = np.arange(number * KV_TILE, (number + 1) * KV_TILE) >= lengths[:, None]
    return beyond


def attend(
    queries: Floats, store: Floats, offset: int, group: QueryGroup, heads: CacheHeads, room: Floats, out: Floats
) -> None:
    """Attention of one group's tokens in one layer.

    Args:
        queries: `[T, heads, share, key_dim]`, scaled.
        store: the cache as pieces.
        offset: of the layer's pieces from those of layer 0.
        group: the tokens and their way along the cache.
        heads: what the cache holds.
        room: `[n, KV_TILE, width]` for a tile of each request of the group; fresh memory would cost more than copying.
        out: `[T, heads, share, value_dim]`; the rows of the group's tokens are written.
    """
    count = len(group.tokens)
    tiled = queries[group.tokens].transpose(0, 2, 1, 3, 4).reshape(count, heads.heads, -1, group.height, heads.key_dim)
    state = _Softmax.start(tiled.shape[:4], heads.value_dim)
    for tile in group.tiles:
        content = room[: len(tile.units)]
        pieces = content.reshape(*tile.units.shape, *store.shape[1:])
        store.take(tile.units + offset, axis=0, out=pieces, mode="clip")  # ids were checked; clip writes in place
        if tile.stale is not None:
            content[tile.stale] = 0  # whatever lies there, even what is no number
        keys, values = heads.split(content)
        scores = np.matmul(tiled[: tile.queries], keys)
        if tile.visible is not None:
            scores = np.where(tile.visible, scores, np.float32(-np.inf))
        state.add(scores, values)
    result = state.result().reshape(count, heads.heads, -1, heads.share, heads.value_dim)
    out[group.tokens] = result.transpose(0, 2, 1, 3, 4)


@dataclass(frozen=True, slots=True, eq=False)
class _Softmax:
    """State of the online softmax of n tiles of queries.

    Attributes:
        top: `[n, heads, products, height, 1]` largest score so far.
        total: the same shape: sum of exp(score - top).
        output: `[n, heads, products, height, d]` sum of exp(score - top) * value.
    """

    top: Floats
    total: Floats
    output: Floats

    @classmethod
    def start(cls, shape: tuple[int, ...], value_dim: int) -> _Softmax:
        top = np.full((*shape, 1), _LOWEST)
        return cls(top, np.zeros_like(top), np.zeros((*shape, value_dim), np.float32))

    def add(self, scores: Floats, values: Floats) -> None:
        """Take in a tile: `scores [m, .., KV_TILE]` of the first m, which are overwritten, and its values."""
        top, total, output = (part[: len(scores)] for part in (self.top, self.total, self.output))
        higher = np.maximum(top, scores.max(axis=-1, keepdims=True))
        shrink = np.exp(top - higher)
        top[:] = higher
        scores -= higher
        factors = np.exp(scores, out=scores)
        total *= shrink
        total += factors.sum(axis=-1, keepdims=True)
        output *= shrink
        output += np.matmul(factors, values)

    def result(self) -> Floats:
        return self.output / self.total
