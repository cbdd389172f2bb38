"""A request that was posted, whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

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


class Asker(Protocol):
    """A client that has one request under way at a time."""

    def look(self, until_s: float) -> Reply | None:
        """The reply to that request, if it comes by then."""
        ...

    def withdraw(self, sequence: int) -> None:
        """Want no reply to the request of this number any more, if it is still that which is under way."""
        ...


class PendingAt(Pending):
    """The request that a client has under way.

    Args:
        client: which.
        sequence: the request's number.
        name: as for `Pending`.
    """

    def __init__(self, client: Asker, sequence: int, name: str) -> None:
        super().__init__(name)
        self._client, self._sequence = client, sequence

    def look(self, until_s: float) -> Reply | None:
        """See `Pending`."""
        try:
            return self._client.look(until_s)
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """See `Pending`."""
        self._client.withdraw(self._sequence)
