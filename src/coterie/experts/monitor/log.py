"""The last changes, for followers that come back."""

from __future__ import annotations

from collections import deque

from coterie.experts.view import AllKnown, Change

LENGTH = 1024


class ChangeLog:
    """The last `LENGTH` changes.

    Args:
        epoch: the number of the last change before the first one.
    """

    def __init__(self, epoch: int) -> None:
        self._before = epoch
        self._changes: deque[Change | AllKnown] = deque()

    def add(self, change: Change | AllKnown) -> None:
        """Keep a change, whose epoch is above that of the last one."""
        self._changes.append(change)
        if len(self._changes) > LENGTH:
            self._before = self._changes.popleft().epoch

    def after(self, epoch: int) -> list[Change | AllKnown] | None:
        """The changes after this epoch; None if they are not all known any more, or never were."""
        last = self._changes[-1].epoch if self._changes else self._before
        if not self._before <= epoch <= last:
            return None
        return [change for change in self._changes if change.epoch > epoch]
