"""One row of expert counts per physical KV block.

Indexing by physical block is what makes prefix hits, eviction and reuse need no state of their own
(ELDR section 1.3, signature cache): whoever holds the block holds its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.wire import Ids, smallest_dtype


class Rows(Protocol):
    """Counts `[blocks + 1, L, E]` of tokens per block; the last row is for padding tokens.

    An expert is chosen at most once per token, so a count never exceeds the block size: that sets the dtype.
    """

    @property
    def nbytes(self) -> int:
        """Memory of the store in bytes."""
        ...

    def restart(self, blocks: Sequence[int]) -> None:
        """Forget what the blocks held."""
        ...

    def add(self, slots: Any, ids: Any) -> None:
        """Count one forward pass.

        Args:
            slots: `[T]` KV slot of each token, `block * block_size + offset`; padding comes last and is negative.
            ids: `[T, L, top_k]` experts that each token chose; anything for padding.
        """
        ...

    def sum(self, blocks: Sequence[int]) -> tuple[int, npt.NDArray[np.int32]]:
        """Counted tokens of the blocks and their counts `[L, E]`."""
        ...

    def ids_at(self, slots: Any, ids: Any, wanted: Sequence[int]) -> Ids | None:
        """Ids `[len(wanted), L, top_k]` of the tokens at the KV slots `wanted`, or None if one was not forwarded.

        Args:
            slots: as in `add`.
            ids: as in `add`.
            wanted: KV slots, in the order of the result.
        """
        ...


class HostRows:
    """`Rows` in numpy; takes tensors that share memory with it."""

    def __init__(self, blocks: int, block_size: int, geometry: ModelGeometry) -> None:
        dtype = smallest_dtype(block_size)
        self._rows = np.zeros((blocks + 1, geometry.layers, geometry.experts), dtype)
        self._flat = self._rows.reshape(-1)
        self._one = dtype.type(1)  # of the rows' own dtype: np.add.at is much slower where it must convert
        self._block_size = block_size
        self._top_k = geometry.top_k
        self._row_size = geometry.layers * geometry.experts
        self._layer_base = (np.arange(geometry.layers) * geometry.experts).reshape(1, -1, 1)

    @property
    def nbytes(self) -> int:
        """See `Rows`."""
        return self._rows.nbytes

    def restart(self, blocks: Sequence[int]) -> None:
        """See `Rows`."""
        self._rows[blocks] = 0

    def add(self, slots: Any, ids: npt.NDArray[np.integer[Any]]) -> None:
        """See `Rows`."""
        slot = np.asarray(slots)
        if slot.size and slot[-1] < 0:  # padding is at the end
            real = slot >= 0
            slot, ids = slot[real], ids[real]
        row = (slot // self._block_size * self._row_size).reshape(-1, 1, 1)
        np.add.at(self._flat, (ids + self._layer_base + row).reshape(-1), self._one)

    def sum(self, blocks: Sequence[int]) -> tuple[int, npt.NDArray[np.int32]]:
        """See `Rows`."""
        total = self._rows[blocks].sum(0, dtype=np.int32)
        return int(total[0].sum()) // self._top_k, total

    def ids_at(self, slots: Any, ids: npt.NDArray[np.integer[Any]], wanted: Sequence[int]) -> Ids | None:
        """See `Rows`."""
        slot = np.asarray(slots)
        order = np.argsort(slot)
        at = order[np.searchsorted(slot[order], wanted).clip(max=slot.size - 1)]
        return ids[at] if np.array_equal(slot[at], wanted) else None
