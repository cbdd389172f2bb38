"""Long work on the token loop, in turns with everything else."""

from __future__ import annotations

import asyncio
import time

from coterie.engines.base import Body
from coterie.engines.json_windows import InvalidJsonError, T, Turns
from coterie.engines.large import NOTHING_LARGE, Large, cut_down
from coterie.engines.pieces import Piece, Pieces
from coterie.errors import EngineError, RequestError

TURN_S = 0.0005
"""How long one turn may take, give or take a part of the work; whatever waits meanwhile waits so much longer."""


_LET_GO_AFTER_S = 0.5  # by then, nobody else holds it
_DROPPED_A_TURN = 32


class Turnstile:
    """Lets one piece of long work have a turn at a time, however many there are, in the order in which they ask."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

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

    def let_go(self, body: Body) -> None:
        """Free a body of a request that is over, part by part if it is large; all at once, that takes milliseconds."""
        if isinstance(body, Pieces):
            self._loop.call_later(_LET_GO_AFTER_S, self._drop, list(body.parts))

    def _drop(self, parts: list[Piece]) -> None:
        del parts[-_DROPPED_A_TURN:]
        if parts:
            self._loop.call_soon(self._drop, parts)

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
