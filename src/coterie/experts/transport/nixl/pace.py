"""How long to sleep between two looks, where nothing wakes who waits."""

from __future__ import annotations

SHORTEST_S = 20e-6


class Pace:
    """Looks grow rarer with the time since there was something: a wait is longer by an eighth at most, or `SHORTEST_S`.

    Args:
        longest_s: the longest sleep, which bounds what idleness costs, and how late the first look comes after it.
        now_s: the time.
    """

    def __init__(self, longest_s: float, now_s: float) -> None:
        self._longest_s, self._since_s = longest_s, now_s

    def reset(self, now_s: float) -> None:
        """There was something."""
        self._since_s = now_s

    def sleep_s(self, now_s: float) -> float:
        """How long to sleep now."""
        return min(max(SHORTEST_S, (now_s - self._since_s) / 8), self._longest_s)
