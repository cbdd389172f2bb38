"""Physical KV blocks: who holds them, and which contents can be found again.

    free     holds nothing that can be found; handed out first
    cached   nobody holds it, its content can be found by hash; the least recently released is evicted first
    held     one or more requests refer to it; its content may be found by hash as well

    free + cached + held = all, at any time.

A full block is named by a hash over its parent's hash and its own tokens, so equal hashes mean equal text from the
first token on (vLLM, "Automatic Prefix Caching": https://docs.vllm.ai/en/latest/design/prefix_caching.html).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from coterie.errors import ConfigError

BlockHash = bytes
"""32 bytes (BLAKE2b, 256 bits: nobody can make two texts collide)."""


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name of the full block with these tokens, after the block named `parent` (empty for the first)."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=32).digest()


class BlockPool:
    """All KV blocks of an engine.  Callers pass blocks they were given: nothing is checked but the pool's own laws.

    Args:
        blocks: how many there are.
        block_size: tokens of each.

    Raises:
        ConfigError: there are none, or they hold no token.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        if blocks < 1 or block_size < 1:
            raise ConfigError(f"KV cache: {blocks} blocks of {block_size} tokens; both must be at least 1")
        self.blocks = blocks
        self.block_size = block_size
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # least recently released first
        self._by_hash: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.blocks * self.block_size

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds and whose content can be found."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that someone holds."""
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks of the longest run of `hashes`, from the first on, that can be found.  They are not held yet."""
        found = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def knows(self, name: BlockHash) -> bool:
        """Whether a block of this hash can be found."""
        return name in self._by_hash

    def unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds: what holding them would take from `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Refer to found blocks, so that they are not evicted."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Blocks for new content, held once; None, and nothing done, where there are too few."""
        if count > self.available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._by_hash[self._hash_of.pop(block)]
        self._references[block] = 1
        return block

    def publish(self, block: int, name: BlockHash) -> None:
        """A held block became full and may be found by this hash; of several with one content, the first is found."""
        if name not in self._by_hash:
            self._by_hash[name] = block
            self._hash_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a request's blocks; its last ones are evicted first, since fewer texts begin with them."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check(self) -> None:
        """Check the pool's laws.

        Raises:
            AssertionError: a block is lost, or in two states.
        """
        held = {block for block, count in enumerate(self._references) if count > 0}
        free, cached = set(self._free), set(self._cached)
        assert min(self._references) >= 0, "a block was released more often than held"
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(held) == self.blocks == len(free | cached | held), "a block is lost"
        assert {block: name for name, block in self._by_hash.items()} == self._hash_of, "a hash names two blocks"
        assert cached <= self._hash_of.keys(), "a cached block cannot be found"
        assert not free & self._hash_of.keys(), "a free block can be found"
