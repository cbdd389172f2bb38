"""A request that was posted, whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from coterie.errors import EngineError
from coterie.experts.protocol import Reply


class FullError(EngineError):
    """A server lives, and all its slots are taken."""


class Pending(ABC):
    """Several, at as many servers, may be waited for one after the other.

    Args:
        name: of the server, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def wait(self, deadline_s: float) -> Reply:
        """The reply, once.

        Args:
            deadline_s: until when to wait, by `time.monotonic`; one that has passed asks for what is there already.

        Raises:
            GoneError: the server died.
            EngineError: it did not reply in time, or its connection was lost.
            WireError: the reply cannot be read, or is to another request.

        After each of them the request is withdrawn.
        """
        reply = self.look(deadline_s)
        if reply is None:
            self.withdraw()
            raise EngineError(f"expert server {self._name} did not reply in time")
        return reply

    @abstractmethod
    def look(self, until_s: float) -> Reply | None:
        """As `wait`, but a request without a reply by then is not withdrawn: it may still come."""

    @abstractmethod
    def withdraw(self) -> None:
        """Want no reply any more."""
