"""Expert layers: SwiGLU feed-forwards over tokens grouped by expert.

    y = sum_j weight_j * (silu(x W_gate) * (x W_up)) W_down        over the experts j that the token chose

GPT-OSS's have biases, and bounds (transformers, modeling_gpt_oss.py, `GptOssExperts._apply_gate`):

    (g / (1 + exp(-slope g)) * (u + 1)) W_down + b_down,  g = min(x W_gate + b_gate, limit),
                                                          u = x W_up + b_up, within +-limit

An expert's intermediate dimension is cut into blocks of `BLOCK`: `gate_up [E, B, D, 2 * BLOCK]` holds a block's gate
columns and then its up columns, `down [E, B, BLOCK, D]` its rows.  The blocks' results are added in order, outside of
BLAS, so that blocks of zeros appended to an expert leave its output as it was, bit for bit.

Only experts that some token chose are read.  Their weights are read once for each `WAVE` tiles of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coterie.modeling.gates import Choice, Ids
from coterie.modeling.tiles import ROWS, Floats, Shape, into_tiles

BLOCK = 64
"""Columns of a block of an expert's intermediate dimension."""
EXPERT_ROWS = 4
"""Tokens of a tile of one expert: few, as a decode batch gives an expert few."""
WAVE = 1024
"""Tiles whose intermediate values are held at once, divided by the blocks of an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """What experts with biases and bounds have besides their matrices.

    Attributes:
        gate_up: `[E, B, 2 * BLOCK]` biases of a block's gate columns, then of its up columns.
        down: `[E, D]` biases.
        slope: factor in the sigmoid.
        limit: bound of gates and ups.
    """

    gate_up: Floats
    down: Floats
    slope: float
    limit: float


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Feed-forwards of equal shape: a layer's experts, or a single dense one.

    Attributes:
        gate_up: `[E, B, D, 2 * BLOCK]`.
        down: `[E, B, BLOCK, D]`.
        bounded: of experts that have biases and bounds.
    """

    gate_up: Floats
    down: Floats
    bounded: Bounded | None = None

    def shapes(self, rows: int) -> tuple[Shape, Shape]:
        """The two products that a tile of so many rows takes part in."""
        hidden = self.down.shape[3]
        return (rows, hidden, 2 * BLOCK), (rows, BLOCK, hidden)


def block_expert(gate: Floats, up: Floats, down: Floats, blocks: int) -> tuple[Floats, Floats]:
    """Cut one expert into blocks, zeros beyond its own intermediate size.

    Args:
        gate: `[I, D]`, as checkpoints store it.
        up: `[I, D]`.
        down: `[D, I]`.
        blocks: how many; at least `I / BLOCK`.

    Returns:
        `gate_up [blocks, D, 2 * BLOCK]` and `down [blocks, BLOCK, D]`.
    """
    size, hidden = gate.shape
    inward = np.zeros((2, blocks * BLOCK, hidden), np.float32)
    inward[0, :size], inward[1, :size] = gate, up
    outward = np.zeros((blocks * BLOCK, hidden), np.float32)
    outward[:size] = down.T
    columns = inward.reshape(2, blocks, BLOCK, hidden).transpose(1, 3, 0, 2)  # (B, D, gate and up, BLOCK)
    return np.ascontiguousarray(columns).reshape(blocks, hidden, 2 * BLOCK), outward.reshape(blocks, BLOCK, hidden)


def block_biases(gate: Floats, up: Floats, blocks: int) -> Floats:
    """Biases of one expert's gates and ups, `[I]` each: `[blocks, 2 * BLOCK]`, as `block_expert` has their columns."""
    biases = np.zeros((2, blocks * BLOCK), np.float32)
    biases[0, : gate.size], biases[1, : up.size] = gate, up
    return biases.reshape(2, blocks, BLOCK).swapaxes(0, 1).reshape(blocks, 2 * BLOCK)


def dense(rows: Floats, weights: ExpertWeights) -> Floats:
    """A feed-forward that every token takes: a dense layer, or shared experts.

    Args:
        rows: `[T, D]`.
        weights: of one expert.

    Returns:
        `[T, D]`; a row's bits depend on that row alone.
    """
    tiles = into_tiles(rows, ROWS)
    bounds = np.array([0, len(tiles)])
    return _feed_forward(tiles, bounds, weights).reshape(-1, rows.shape[1])[: len(rows)]


def routed(rows: Floats, choice: Choice, weights: ExpertWeights) -> Floats:
    """The weighted sum of what each token's experts make of it.

    Args:
        rows: `[T, D]`.
        choice: experts and weights of the T tokens; an expert -1 adds nothing.
        weights: of all experts of the layer.

    Returns:
        `[T, D]`; a row's bits depend on that row and its choice alone.
    """
    tokens, top_k = choice.ids.shape
    own = np.flatnonzero(choice.ids.ravel() >= 0)
    bounds, places = _group(choice.ids.ravel()[own], len(weights.gate_up))
    hidden = rows.shape[1]
    source = np.zeros(bounds[-1] * EXPERT_ROWS, np.intp)  # rows that no token fills repeat the first
    source[places] = own // top_k
    outputs = _feed_forward(rows[source].reshape(-1, EXPERT_ROWS, hidden), bounds, weights)
    each = np.zeros((tokens * top_k, hidden), np.float32)
    each[own] = outputs.reshape(-1, hidden)[places]
    each = each.reshape(tokens, top_k, hidden)
    each *= choice.weights[..., None]
    total = each[:, 0]
    for place in range(1, top_k):
        total += each[:, place]
    return total


def _group(ids: Ids, experts: int) -> tuple[Ids, Ids]:
    """Give each expert whole tiles, and each pair of token and expert, `ids [P]`, a row in them.

    Returns:
        `bounds [E + 1]`: expert e has the tiles from `bounds[e]` to `bounds[e + 1]`; `places [P]`: the row,
        counted over all tiles, of each pair.
    """
    counts = np.bincount(ids, minlength=experts)
    bounds = np.concatenate(([0], np.cumsum(-(-counts // EXPERT_ROWS))))
    order = np.argsort(ids, kind="stable")
    rank = np.arange(ids.size) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.empty(ids.size, np.intp)
    places[order] = bounds[ids[order]] * EXPERT_ROWS + rank
    return bounds, places


def _feed_forward(tiles: Floats, bounds: Ids, weights: ExpertWeights) -> Floats:
    """Run expert e on the tiles `[bounds[e], bounds[e + 1])` of `tiles [N, rows, D]`."""
    results = np.empty_like(tiles)
    wave = max(1, WAVE // weights.down.shape[1])
    for start in range(0, len(tiles), wave):
        stop = min(start + wave, len(tiles))
        results[start:stop] = _wave(tiles[start:stop], np.clip(bounds, start, stop) - start, weights)
    return results


def _wave(tiles: Floats, bounds: Ids, weights: ExpertWeights) -> Floats:
    count, rows, hidden = tiles.shape
    blocks = weights.down.shape[1]
    inner = np.empty((count, blocks, rows, 2 * BLOCK), np.float32)
    for expert, start, stop in _active(bounds):
        np.matmul(tiles[start:stop, None], weights.gate_up[expert], out=inner[start:stop])
        if weights.bounded:
            inner[start:stop] += weights.bounded.gate_up[expert, :, None]
    gated = _gated(inner, weights.bounded)
    parts = np.empty((count, blocks, rows, hidden), np.float32)
    for expert, start, stop in _active(bounds):
        np.matmul(gated[start:stop], weights.down[expert], out=parts[start:stop])
    total = parts[:, 0]
    for block in range(1, blocks):
        total += parts[:, block]
    if weights.bounded:
        for expert, start, stop in _active(bounds):
            total[start:stop] += weights.bounded.down[expert]
    return total


def _active(bounds: Ids) -> Iterator[tuple[int, int, int]]:
    """Experts that have tiles, and which."""
    experts = np.flatnonzero(np.diff(bounds))
    return zip(experts.tolist(), bounds[experts].tolist(), bounds[experts + 1].tolist(), strict=True)


def _gated(inner: Floats, bounded: Bounded | None) -> Floats:
    """Gates times ups: `[..., 2 * BLOCK]` to `[..., BLOCK]`."""
    gates, ups = inner[..., :BLOCK], inner[..., BLOCK:]
    if bounded is None:
        return _sigmoid_times(gates, 1.0) * ups
    gates = np.minimum(gates, np.float32(bounded.limit))
    return _sigmoid_times(gates, bounded.slope) * (np.clip(ups, -bounded.limit, bounded.limit) + np.float32(1))


def _sigmoid_times(values: Floats, slope: float) -> Floats:
    """Compute x / (1 + exp(-slope x)) on a contiguous copy: numpy's exp may treat gaps by other code."""
    result = values * np.float32(-slope)
    with np.errstate(over="ignore"):  # of x far below 0; the result is -0 there
        np.exp(result, out=result)
    result += 1
    np.divide(values, result, out=result)
    return result
