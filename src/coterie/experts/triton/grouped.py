"""Grouped products of a batch's tokens with the experts that they chose, in Triton.

A *pair* is a token and one of its experts; a *group* is the pairs of one expert.  Two rules of Expert-as-a-Service
(arXiv 2509.17863) keep the work at what the batch needs, with launches that depend on shapes alone:

- **Group shrink.**  A prefix scan on the device moves the groups that have pairs to the front, with where their rows
  and tiles begin.  Programs read that table once and stop after the last tile, so experts without tokens cost nothing.
- **Token-balanced strides.**  Program p of P takes the tiles p, p + P, p + 2 P of all groups together, however the
  tokens are spread over experts.

Nothing here asks the device for a value, so a batch can be captured in a CUDA graph.  Products add in float32; each
pair's output is multiplied by its router weight and stored by itself, and a token's are added in the order of its
choice: a row's bits depend on that row, its choice, and the block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from coterie.experts.torch.target import DeviceExperts, by_expert

BLOCK_PAIRS = 16
"""Pairs of a tile: few, as a decode batch gives an expert few; the least that a tensor core takes."""
BLOCK_OUT = 64
"""Columns of a tile's output."""
BLOCK_IN = 64
"""Columns that are read at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The pairs of a batch by expert, on the device.  Of the tables only the first `number[0]` entries are defined.

    Attributes:
        order: `[P]` pairs, those of one expert together; pairs of no expert last.
        expert: `[E]` expert of each group.
        pairs: `[E]` how many pairs it has.
        row: `[E]` where they begin in `order`.
        tile: `[E]` number of its first tile, counted over all groups.
        number: `[2]` groups, and tiles of all groups.
    """

    order: torch.Tensor
    expert: torch.Tensor
    pairs: torch.Tensor
    row: torch.Tensor
    tile: torch.Tensor
    number: torch.Tensor


def group(ids: torch.Tensor, experts: int) -> Groups:
    """Sort pairs by expert, and leave out experts that have none.

    Args:
        ids: `[T, K]` int32 experts of each token; -1 for none.
        experts: how many there are.
    """
    order, counts = by_expert(ids, experts)
    tables = torch.empty(4, experts, dtype=torch.int32, device=ids.device)
    number = torch.empty(2, dtype=torch.int32, device=ids.device)
    _shrink[(1,)](counts, tables, number, experts, PADDED=triton.next_power_of_2(experts), ROWS=BLOCK_PAIRS)
    expert, pairs, row, tile = tables.unbind()
    return Groups(order.to(torch.int32), expert, pairs, row, tile, number)


def routed(
    hidden: torch.Tensor, ids: torch.Tensor, router: torch.Tensor, layer: DeviceExperts, programs: int
) -> torch.Tensor:
    """The weighted sum of what experts make of each token.

    Args:
        hidden: `[T, D]`, of the dtype of the experts.
        ids: `[T, K]` int32, each below `layer.experts`; -1 adds nothing.
        router: `[T, K]` float32 weights.
        layer: the experts.
        programs: how many share the tiles; a small multiple of the device's multiprocessors.

    Returns:
        `[T, D]` float32.
    """
    (tokens, top_k), (width, size) = ids.shape, layer.down.shape[1:]
    groups = group(ids, layer.experts)
    inner = torch.empty(tokens * top_k, size, dtype=hidden.dtype, device=hidden.device)
    outer = torch.zeros(tokens * top_k, width, dtype=torch.float32, device=hidden.device)
    common = {
        "PADDED": triton.next_power_of_2(layer.experts), "ROWS": BLOCK_PAIRS, "OUT": BLOCK_OUT, "IN": BLOCK_IN,
        "BIASED": layer.gate_up_bias is not None,
    }  # fmt: skip
    tables = (groups.order, groups.expert, groups.pairs, groups.row, groups.tile, groups.number)
    no_bias = outer  # is not read
    _inward[(programs,)](
        hidden, layer.gate_up, no_bias if layer.gate_up_bias is None else layer.gate_up_bias, inner, *tables,
        width, size, top_k, layer.slope, layer.limit, **common,
    )  # fmt: skip
    _outward[(programs,)](
        inner, layer.down, no_bias if layer.down_bias is None else layer.down_bias, router, outer, *tables,
        width, size, **common,
    )  # fmt: skip
    return outer.view(tokens, top_k, width).sum(1)


@triton.jit
def _shrink(counts, tables, number, experts, PADDED: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Move the experts that have pairs to the front of the four tables of `Groups`; one program."""
    expert = tl.arange(0, PADDED)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    chosen = count > 0
    tiles = (count + ROWS - 1) // ROWS
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(tables + place, expert, mask=chosen)
    tl.store(tables + experts + place, count, mask=chosen)
    tl.store(tables + 2 * experts + place, tl.cumsum(count, 0) - count, mask=chosen)
    tl.store(tables + 3 * experts + place, tl.cumsum(tiles, 0) - tiles, mask=chosen)
    tl.store(number, tl.sum(chosen.to(tl.int32)))
    tl.store(number + 1, tl.sum(tiles))


@triton.jit
def _first_tiles(tile_of, number, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tile of each group, and beyond them a number that no tile has."""
    slots = tl.arange(0, PADDED)
    return tl.load(tile_of + slots, mask=slots < tl.load(number), other=2147483647)


@triton.jit
def _place(tile, first_tiles, tile_of, pairs_of, row_of, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a tile, its rows, and which of them are there."""
    here = tl.sum((first_tiles <= tile).to(tl.int32)) - 1
    offset = (tile - tl.load(tile_of + here)) * ROWS + tl.arange(0, ROWS)
    return here, tl.load(row_of + here) + offset, offset < tl.load(pairs_of + here)


@triton.jit
def _inward(  # type: ignore[no-untyped-def]
    hidden, weights, biases, inner, order, expert_of, pairs_of, row_of, tile_of, number,
    width, size, top_k, slope, limit,
    PADDED: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """`inner[row] = act(x W_gate, x W_up)` of the pairs in the order of groups."""
    first_tiles = _first_tiles(tile_of, number, PADDED)
    columns = tl.cdiv(size, OUT)
    total = tl.load(number + 1) * columns
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        here, rows, present = _place(tile // columns, first_tiles, tile_of, pairs_of, row_of, ROWS)
        tokens = tl.load(order + rows, mask=present, other=0) // top_k
        outs = (tile % columns) * OUT + tl.arange(0, OUT)
        expert = tl.load(expert_of + here).to(tl.int64)
        matrix = weights + expert * 2 * size * width
        gate = tl.zeros((ROWS, OUT), tl.float32)
        up = tl.zeros((ROWS, OUT), tl.float32)
        for start in range(0, width, IN):
            ins = start + tl.arange(0, IN)
            x = tl.load(
                hidden + tokens[:, None].to(tl.int64) * width + ins[None, :],
                mask=present[:, None] & (ins < width)[None, :], other=0.0,
            )  # fmt: skip
            at = outs[None, :] * width + ins[:, None]
            inside = (outs < size)[None, :] & (ins < width)[:, None]
            gate = tl.dot(x, tl.load(matrix + at, mask=inside, other=0.0), gate, input_precision="ieee")
            up = tl.dot(x, tl.load(matrix + size * width + at, mask=inside, other=0.0), up, input_precision="ieee")
        if BIASED:
            bias = biases + expert * 2 * size + outs
            gate = tl.minimum(gate + tl.load(bias, mask=outs < size, other=0.0)[None, :], limit)
            up += tl.load(bias + size, mask=outs < size, other=0.0)[None, :]
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        made = gate / (1.0 + tl.exp(-slope * gate)) * up
        tl.store(
            inner + rows[:, None].to(tl.int64) * size + outs[None, :], made.to(inner.dtype.element_ty),
            mask=present[:, None] & (outs < size)[None, :],
        )  # fmt: skip


@triton.jit
def _outward(  # type: ignore[no-untyped-def]
    inner, weights, biases, router, outer, order, expert_of, pairs_of, row_of, tile_of, number,
    width, size,
    PADDED: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """`outer[pair] = router[pair] * (inner W_down)`."""
    first_tiles = _first_tiles(tile_of, number, PADDED)
    columns = tl.cdiv(width, OUT)
    total = tl.load(number + 1) * columns
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        here, rows, present = _place(tile // columns, first_tiles, tile_of, pairs_of, row_of, ROWS)
        pairs = tl.load(order + rows, mask=present, other=0)
        outs = (tile % columns) * OUT + tl.arange(0, OUT)
        expert = tl.load(expert_of + here).to(tl.int64)
        matrix = weights + expert * width * size
        made = tl.zeros((ROWS, OUT), tl.float32)
        for start in range(0, size, IN):
            ins = start + tl.arange(0, IN)
            h = tl.load(
                inner + rows[:, None].to(tl.int64) * size + ins[None, :],
                mask=present[:, None] & (ins < size)[None, :], other=0.0,
            )  # fmt: skip
            inside = (outs < width)[None, :] & (ins < size)[:, None]
            w = tl.load(matrix + outs[None, :] * size + ins[:, None], mask=inside, other=0.0)
            made = tl.dot(h, w, made, input_precision="ieee")
        if BIASED:
            made += tl.load(biases + expert * width + outs, mask=outs < width, other=0.0)[None, :]
        made *= tl.load(router + pairs, mask=present, other=0.0)[:, None]
        tl.store(
            outer + pairs[:, None].to(tl.int64) * width + outs[None, :], made,
            mask=present[:, None] & (outs < width)[None, :],
        )  # fmt: skip
