"""All ways by which requests come to an expert server: one wait, one batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from coterie.errors import WireError
from coterie.experts.protocol import Reply, Request, Status
from coterie.experts.transport.inlet import Inlet, Ready
from coterie.experts.transport.shared import SharedServer

_log = logging.getLogger("coterie.experts")


class Intake:
    """The ways of one server.  One thread calls `step`, again and again.

    Args:
        shared: the slots in shared memory, at whose doorbell the thread sleeps.
        others: the other ways.

    Attributes:
        malformed: requests that could not be read, so far.
    """

    def __init__(self, shared: SharedServer, *others: Inlet) -> None:
        self._shared, self._inlets = shared, (shared, *others)
        self._no_sums = np.empty((0, shared.shape.hidden), np.float32)
        self.malformed = 0

    @property
    def clients(self) -> int:
        """How many can send requests now; may be asked by any thread."""
        return sum(inlet.clients for inlet in self._inlets)

    @property
    def waiting(self) -> int:
        """Requests that wait or are computed; may be asked by any thread."""
        return sum(inlet.waiting for inlet in self._inlets)

    def step(self, compute: Callable[[Sequence[Request]], Sequence[Reply]], timeout_s: float) -> int:
        """Wait for requests, and reply to all that are ready; to those that cannot be read, that they are malformed.

        Args:
            compute: gets the others together, if there are any, and gives as many replies.
            timeout_s: how long to wait, at most.

        Returns:
            How many there were.
        """
        picked = self._shared.wait(self._pick_up, timeout_s) or []
        wanted: list[tuple[Request, Callable[[Reply], None]]] = []
        for ready in picked:
            if isinstance(ready.request, WireError):
                self._refuse(ready, ready.request)
            else:
                wanted.append((ready.request, ready.reply))
        if wanted:
            replies = compute([request for request, _ in wanted])
            for (_, answer), reply in zip(wanted, replies, strict=True):
                answer(reply)
        return len(picked)

    def close(self) -> None:
        """Take no new clients."""
        for inlet in self._inlets:
            inlet.close()

    def _pick_up(self) -> list[Ready] | None:
        return [ready for inlet in self._inlets for ready in inlet.pick_up()] or None

    def _refuse(self, ready: Ready, problem: WireError) -> None:
        self.malformed += 1
        _log.warning("refused: %s", problem)
        ready.reply(Reply(0, Status.MALFORMED, self._no_sums))
