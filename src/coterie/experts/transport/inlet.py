"""One way by which requests come to an expert server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from coterie.errors import WireError
from coterie.experts.protocol import Reply, Request


class Ready(msgspec.Struct, frozen=True, eq=False):
    """A request that waits for its reply.

    Attributes:
        request: it, or what is wrong with it, if it cannot be read.
        reply: to be called once; does nothing if the request is no longer wanted.
    """

    request: Request | WireError
    reply: Callable[[Reply], None]


class Inlet(Protocol):
    """One way.  When it has something, it rings the server's doorbell, `SharedServer.ring`."""

    @property
    def clients(self) -> int:
        """How many can send requests now; may be asked by any thread."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait or are computed; may be asked by any thread."""
        ...

    def pick_up(self) -> list[Ready]:
        """Requests that were not picked up yet."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...
