"""Bodies that are kept in the pieces in which they came, since joining tens of megabytes takes tens of milliseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Piece = bytes | memoryview


class Pieces:
    """Bytes in pieces.

    Attributes:
        parts: the pieces, none empty.
    """

    __slots__ = ("_ends", "parts")

    def __init__(self, parts: Iterable[Piece]) -> None:
        self.parts: Sequence[Piece] = [part for part in parts if part]
        self._ends = list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def span(self, start: int, stop: int) -> list[Piece]:
        """The bytes from `start` to `stop`, not copied."""
        found: list[Piece] = []
        i = bisect_right(self._ends, start)
        while start < stop and i < len(self.parts):
            part = self.parts[i]
            begin = self._ends[i] - len(part)
            whole = begin >= start and self._ends[i] <= stop
            found.append(part if whole else memoryview(part)[start - begin : stop - begin])
            start, i = self._ends[i], i + 1
        return found

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, joined: a few at a time, or they are a copy for nothing."""
        return b"".join(self.span(start, stop))
