"""When a peer is told again."""

from __future__ import annotations

PARTS = 4
"""Looks at what has changed in the longest time between two messages; changes between two looks are told together."""


class Pace:
    """The rule for one peer: a change is told at the next look, and all is told once in a while, changed or not.

    There is one message on its way at a time; a peer that does not take one is tried again once in a while.

    Args:
        exchange_s: the longest time between two messages.
    """

    def __init__(self, exchange_s: float) -> None:
        self._exchange_s = exchange_s
        self._begun_s = float("-inf")
        self._told: object = None
        self._busy = self._failed = False

    @property
    def look_s(self) -> float:
        """From one look to the next."""
        return self._exchange_s / PARTS

    def due(self, now_s: float, mark: object) -> bool:
        """Whether to begin a message that says what `mark` stands for."""
        if self._busy:
            return False
        long_ago = now_s - self._begun_s > self._exchange_s - self.look_s / 2  # the look that is nearest to it
        return long_ago or (mark != self._told and not self._failed)

    def began(self, now_s: float, mark: object) -> None:
        """A message is on its way."""
        self._begun_s, self._told, self._busy = now_s, mark, True

    def ended(self, *, taken: bool) -> None:
        """It was taken, or not."""
        self._busy, self._failed = False, not taken
