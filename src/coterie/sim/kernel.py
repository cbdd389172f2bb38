"""The event loop of a simulation: one heap, one `step()`."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any


class Priority(IntEnum):
    """What comes first among the events of one moment.

    Workers come and go before anything else; then what is over frees its place; then what is new arrives; steps begin
    last, so that they find everything that has happened by then.
    """

    CHANGE = 0
    END = 1
    HANDOFF = 2
    ARRIVAL = 3
    START = 4


class Kernel:
    """Runs actions in the order of (time, priority, sequence).

    A `Clock`: time stands still within an action and moves only from one event to the next, so an action never sees
    what happens later.
    """

    __slots__ = ("_heap", "_now_s", "_sequence", "_ticks")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._ticks = 0  # of the events
        self._now_s = 0.0
        self._sequence = 0

    def __len__(self) -> int:
        """Events to come, ticks left out."""
        return len(self._heap) - self._ticks

    def now(self) -> float:
        """Seconds since the start."""
        return self._now_s

    def at(self, time_s: float, priority: Priority, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action(*arguments)` at a time that is not past."""
        assert time_s >= self._now_s, f"an event at {time_s} s, but it is {self._now_s} s"
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, priority, self._sequence, action, arguments))

    def after(self, delay_s: float, priority: Priority, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action(*arguments)` after a delay."""
        self.at(self._now_s + delay_s, priority, action, *arguments)

    def every(self, interval_s: float, action: Callable[[], object]) -> None:
        """Call `action()` after each interval, before what else happens then, as long as anything else is to come."""
        self._ticks += 1
        self.after(interval_s, Priority.CHANGE, self._tick, interval_s, action)

    def _tick(self, interval_s: float, action: Callable[[], object]) -> None:
        self._ticks -= 1
        action()
        self.every(interval_s, action)

    def step(self) -> bool:
        """Run the next event.

        Returns:
            False if nothing but ticks is to come.
        """
        if len(self._heap) == self._ticks:
            return False
        self._now_s, _, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)
        return True

    def run(self) -> None:
        """Run until no event is left."""
        while self.step():
            pass
