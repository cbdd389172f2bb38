"""Long work on the token loop, in turns with everything else."""

from __future__ import annotations

import asyncio
import time

from coterie.engines.base import Body
from coterie.engines.json_windows import InvalidJsonError, T, Turns
from coterie.engines.large import NOTHING_LARGE, Large, cut_down
from coterie.errors import EngineError, RequestError

TURN_S = 0.0005
"""How long one turn may take, give or take a part of the work; whatever waits meanwhile waits so much longer."""


class Turnstile:
    """Lets one piece of long work have a turn at a time, however many there are, in the order in which they ask."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Turns[T]) -> T:
        """Do all of it; what it raises is raised here."""
        while True:
            async with self._lock:
                end_s = time.perf_counter() + TURN_S
                try:
                    while time.perf_counter() < end_s:
                        next(work)
                except StopIteration as end:
                    result: T = end.value
                    return result
                await asyncio.sleep(0)  # with the lock: no more than one turn between two looks at the sockets

    async def read_request(self, body: Body) -> tuple[bytes, Large]:
        """A client's body, cut down if it is large.

        Raises:
            RequestError: it is large, and not valid JSON.
        """
        if isinstance(body, bytes):
            return body, NOTHING_LARGE
        try:
            return await self.run(cut_down(body))
        except InvalidJsonError as error:
            raise RequestError(f"the body cannot be read: {error}") from None

    async def read_reply(self, body: Body) -> tuple[bytes, Large]:
        """A worker's reply, cut down if it is large.

        Raises:
            EngineError: it is large, and not valid JSON.
        """
        if isinstance(body, bytes):
            return body, NOTHING_LARGE
        try:
            return await self.run(cut_down(body))
        except InvalidJsonError as error:
            raise EngineError(f"the reply cannot be read: {error}") from None
