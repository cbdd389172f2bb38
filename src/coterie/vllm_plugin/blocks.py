"""Worker side: one row of expert counts per physical KV block, on the engine's device.

Indexing by physical block is what makes prefix hits, eviction and reuse need no state of their own
(ELDR section 4): whoever holds the block holds its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry


class BlockCounts:
    """Counts `[blocks + 1, L, E]` of tokens per block; the last row takes padding tokens.

    Args:
        blocks: physical KV blocks.
        block_size: tokens per block; an expert is chosen at most once per token, so a count never exceeds it.
        geometry: MoE layers, experts, top-k.
        device: torch device of the forward pass.
    """

    def __init__(self, blocks: int, block_size: int, geometry: ModelGeometry, device: Any) -> None:
        import torch

        self._torch = torch
        self._block_size = block_size
        self._geometry = geometry
        self._dtype = next(d for d, most in _dtypes(torch) if block_size <= most)
        shape = (blocks + 1, geometry.layers, geometry.experts)
        self._rows = torch.zeros(shape, dtype=self._dtype, device=device)
        self._flat = self._rows.view(-1)
        self._layer_base = (torch.arange(geometry.layers, device=device) * geometry.experts).view(1, -1, 1)
        self._row_size = geometry.layers * geometry.experts
        self._padding_row = blocks
        self._ones = torch.ones(0, dtype=self._dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Memory of the store in bytes."""
        return int(self._rows.numel() * self._rows.element_size())

    def restart(self, blocks: Sequence[int]) -> None:
        """Forget what the blocks held."""
        self._rows[self._index(blocks)] = 0

    def add(self, slots: Any, ids: Any) -> None:
        """Count one forward pass.

        Args:
            slots: `[T]` KV slot of each token (`block * block_size + offset`); negative for padding.
            ids: `[T, L, top_k]` experts that each token chose.
        """
        torch = self._torch
        padding = slots < 0
        block = torch.where(padding, self._padding_row, slots // self._block_size)
        # ids of padding rows are whatever the buffer held: keep them inside the row
        index = torch.where(padding.view(-1, 1, 1), 0, ids) + self._layer_base + (block * self._row_size).view(-1, 1, 1)
        index = index.view(-1)
        if self._ones.numel() < index.numel():
            self._ones = torch.ones(index.numel(), dtype=self._dtype, device=index.device)
        self._flat.index_add_(0, index, self._ones[: index.numel()])

    def sum(self, blocks: Sequence[int]) -> tuple[int, npt.NDArray[np.int32]]:
        """Counted tokens of the blocks and their counts `[L, E]`; waits for the device."""
        total = self._rows[self._index(blocks)].sum(0, dtype=self._torch.int32).cpu().numpy()
        return int(total[0].sum()) // self._geometry.top_k, total

    def _index(self, blocks: Sequence[int]) -> Any:
        return self._torch.tensor(blocks, dtype=self._torch.int64, device=self._rows.device)


def _dtypes(torch: Any) -> tuple[tuple[Any, int], ...]:
    return ((torch.uint8, 255), (torch.int16, 32767), (torch.int32, 2**31 - 1))
