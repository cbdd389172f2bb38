"""Room for the KV of a decode worker's requests."""

from __future__ import annotations

import math


class KvBlocks:
    """Blocks that are free; who holds how many is for the caller to know.

    Args:
        tokens: that all blocks hold together; None for no limit.
        block_tokens: tokens of a block.
    """

    def __init__(self, tokens: int | None, block_tokens: int) -> None:
        self._block = block_tokens
        self._all: float = math.inf if tokens is None else tokens // block_tokens
        self._free = self._all

    @property
    def free(self) -> float:
        """Blocks that nobody holds; infinite without a limit."""
        return self._free

    @property
    def usage(self) -> float:
        """Part of the blocks that is held, from 0 to 1; 0 without a limit."""
        return 0.0 if self._all == math.inf else 1 - self._free / self._all

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self._block)

    def take(self, blocks: int) -> bool:
        """Hold blocks; False, and nothing done, where there are too few."""
        if blocks > self._free:
            return False
        self._free -= blocks
        return True

    def give(self, blocks: int) -> None:
        """Let go of blocks."""
        self._free += blocks
