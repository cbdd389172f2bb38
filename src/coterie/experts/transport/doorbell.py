"""A doorbell: one process sleeps until another has something for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from coterie.experts.transport.words import Words

_SLEEPERS = 4  # offset of the second word; the first one counts the rings

T = TypeVar("T")


class Doorbell:
    """Two 32-bit words of shared memory.

    No ring is lost.  Who waits reads the count of rings, then looks, then sleeps only while the count is the same; who
    rings has made its change before, then raises the count.  A sleeper that was killed stays counted, which costs the
    others a system call for each ring.

    Args:
        words: of the mapping.
        offset: of the doorbell in it.
    """

    def __init__(self, words: Words, offset: int) -> None:
        self._words, self._offset = words, offset

    def ring(self) -> None:
        """Have those who wait look again."""
        self._words.add32(self._offset, 1)
        if self._words.load32(self._offset + _SLEEPERS):
            self._words.wake32(self._offset)

    def wait(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `look` finds, which is called at each ring; None if it found nothing in time."""
        deadline_s = time.monotonic() + timeout_s
        self._words.add32(self._offset + _SLEEPERS, 1)
        try:
            while True:
                rings = self._words.load32(self._offset)
                if (found := look()) is not None:
                    return found
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    return None
                self._words.wait32(self._offset, rings, left_s)
        finally:
            self._words.add32(self._offset + _SLEEPERS, -1)
