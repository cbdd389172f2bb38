"""Stop strings: found wherever tokens are cut, and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Cuts a text that arrives in pieces at the first stop string.

    The first is the one that is complete first, and the longest of those: what is found does not depend on the pieces.
    What may still become a stop string is held back.

    Args:
        stops: the strings, none empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._longest = len(self._stops[0]) if stops else 0
        self._held = ""

    def add(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take in a piece.

        Args:
            text: the piece.
            armed: whether a stop string may end in it.

        Returns:
            What can be shown now, and the stop string that was found before which it ends.
        """
        if not self._stops:
            return text, None
        known = len(self._held)
        text = self._held + text
        if armed and (found := self._first(text, known)):
            end, stop = found
            self._held = ""
            return text[: end - len(stop)], stop
        shown = len(text) - self._partial(text)
        self._held = text[shown:]
        return text[:shown], None

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, known: int) -> tuple[int, str] | None:
        """End and string of the first match that ends beyond `known`."""
        ends = [
            (place + len(stop), stop)
            for stop in self._stops
            if (place := text.find(stop, max(0, known + 1 - len(stop)))) >= 0
        ]
        return min(ends, key=lambda match: match[0], default=None)  # of equal ends the longest: it comes first

    def _partial(self, text: str) -> int:
        """Characters at the end of the text that a stop string begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) and len(stop) > size for stop in self._stops):
                return size
        return 0
