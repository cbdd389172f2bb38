"""A batch's tokens times the experts that they chose, by torch's grouped GEMM.

A *pair* is a token and one of its experts.  Pairs are sorted by expert, and `torch.nn.functional.grouped_mm` multiplies
the rows of each expert by its matrix; where they end it reads from the device, to which a prefix scan over the counts
has written it.  Rows beyond the last end, of pairs of no expert, it leaves as they were: undefined.

Nothing here asks the device for a value.  grouped_mm itself does not on a GPU of compute capability 9 or 10 and in
bfloat16, where it is one launch of CUTLASS (ATen/native/cuda/GroupedBlas.cpp).  Elsewhere it copies the ends to the
host and multiplies expert by expert.
"""

from __future__ import annotations

import torch
from torch.nn.functional import grouped_mm

from coterie.experts.torch.target import DeviceExperts, by_expert


def routed(hidden: torch.Tensor, ids: torch.Tensor, router: torch.Tensor, layer: DeviceExperts) -> torch.Tensor:
    """The weighted sum of what experts make of each token.

    Args:
        hidden: `[T, D]`, of the dtype of the experts, to which each product is rounded.
        ids: `[T, K]` int32, each below `layer.experts`; -1 adds nothing.
        router: `[T, K]` float32 weights.
        layer: the experts.

    Returns:
        `[T, D]` float32.
    """
    (tokens, top_k), width = ids.shape, hidden.shape[1]
    order, counts = by_expert(ids, layer.experts)
    ends = counts[:-1].cumsum(0, dtype=torch.int32)
    expert = ids.flatten()[order].clamp(min=0)
    made = grouped_mm(hidden[order // top_k], layer.gate_up.transpose(1, 2), offs=ends)
    inner = _gated(_with(made, layer.gate_up_bias, expert), layer).to(hidden.dtype)
    outer = _with(grouped_mm(inner, layer.down.transpose(1, 2), offs=ends), layer.down_bias, expert)
    each = torch.empty_like(outer).index_copy_(0, order, outer).view(tokens, top_k, width)
    # Chosen, and not multiplied by zero: what is undefined may be infinite.
    return torch.where((ids >= 0)[..., None], each * router[..., None], 0.0).sum(1)


def _with(rows: torch.Tensor, biases: torch.Tensor | None, expert: torch.Tensor) -> torch.Tensor:
    """Float32 rows, plus the biases of each row's expert, if experts have any."""
    return rows.float() if biases is None else rows.float() + biases[expert]


def _gated(made: torch.Tensor, layer: DeviceExperts) -> torch.Tensor:
    """`[P, I]` of `[P, 2 I]` gates and ups; see `modeling.experts`."""
    gate, up = made.chunk(2, dim=1)
    if layer.gate_up_bias is not None:
        gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit) + 1
    return gate * torch.sigmoid(layer.slope * gate) * up
