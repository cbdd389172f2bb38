"""Carries news from the engine's thread to the event loop, waking it once for each step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from coterie.engines.embedded.live import Sink
from coterie.engines.embedded.request import TokenOutput

Reader = Callable[[TokenOutput], None]
"""Called on the event loop; must not raise."""


class Mailbox:
    """News on their way.

    Args:
        loop: where they are read.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Reader, TokenOutput]] = deque()

    def sink(self, reader: Reader) -> Sink:
        """For the engine: what it is given reaches `reader`, in order."""
        return lambda output: self._letters.append((reader, output))

    def flush(self) -> None:
        """Engine's thread: have what has gathered read."""
        if self._letters:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._letters:
            reader, output = self._letters.popleft()
            reader(output)
