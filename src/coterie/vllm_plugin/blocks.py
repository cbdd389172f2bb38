"""Worker side: `blockrows.Rows` where the forward pass runs.

`DeviceRows` on an accelerator; on a CPU `blockrows.HostRows`, since a handful of torch calls a step would cost more
than the counting itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.wire import Ids


class DeviceRows:
    """`Rows` in torch, on the device of the forward pass; nothing but `sum` and `ids_at` waits for the device."""

    def __init__(self, blocks: int, block_size: int, geometry: ModelGeometry, device: Any) -> None:
        import torch

        self._torch = torch
        self._block_size = block_size
        self._geometry = geometry
        self._dtype = next(dtype for dtype, most in _dtypes(torch) if block_size <= most)
        shape = (blocks + 1, geometry.layers, geometry.experts)
        self._rows = torch.zeros(shape, dtype=self._dtype, device=device)
        self._flat = self._rows.view(-1)
        self._layer_base = (torch.arange(geometry.layers, device=device) * geometry.experts).view(1, -1, 1)
        self._row_size = geometry.layers * geometry.experts
        self._padding_row = blocks
        self._ones = torch.ones(0, dtype=self._dtype, device=device)

    @property
    def nbytes(self) -> int:
        """See `Rows`."""
        return int(self._rows.numel() * self._rows.element_size())

    def restart(self, blocks: Sequence[int]) -> None:
        """See `Rows`."""
        self._rows[self._index(blocks)] = 0

    def add(self, slots: Any, ids: Any) -> None:
        """See `Rows`."""
        torch = self._torch
        padding = slots < 0  # no branch on it: that would wait for the device
        block = torch.where(padding, self._padding_row, slots // self._block_size)
        known = torch.where(padding.view(-1, 1, 1), 0, ids)
        index = (known + self._layer_base + (block * self._row_size).view(-1, 1, 1)).view(-1)
        if self._ones.numel() < index.numel():
            self._ones = torch.ones(index.numel(), dtype=self._dtype, device=index.device)
        self._flat.index_add_(0, index, self._ones[: index.numel()])

    def sum(self, blocks: Sequence[int]) -> tuple[int, npt.NDArray[np.int32]]:
        """See `Rows`."""
        total = self._rows[self._index(blocks)].sum(0, dtype=self._torch.int32).cpu().numpy()
        return int(total[0].sum()) // self._geometry.top_k, total

    def ids_at(self, slots: Any, ids: Any, wanted: Sequence[int]) -> Ids | None:
        """See `Rows`."""
        ordered, order = slots.to(self._torch.int64).sort()
        asked = self._index(wanted)
        at = self._torch.searchsorted(ordered, asked).clamp(max=ordered.numel() - 1)
        found: Ids = ids[order[at]].cpu().numpy()
        return found if self._torch.equal(ordered[at], asked) else None

    def _index(self, blocks: Sequence[int]) -> Any:
        return self._torch.tensor(blocks, dtype=self._torch.int64, device=self._rows.device)


def _dtypes(torch: Any) -> tuple[tuple[Any, int], ...]:
    return ((torch.uint8, 255), (torch.int16, 32767), (torch.int32, 2**31 - 1))
