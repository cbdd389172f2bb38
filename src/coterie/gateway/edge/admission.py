"""How many requests may be at the workers, and who is next: a rule without clock or loop, and the waiting around it.

A request waits before its prefill and is counted until its reply has ended, so that no finished prefill ever waits
for a place while a prefill worker holds its KV.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from coterie.gateway.edge.http1 import RefusedError, retry_after


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the entrance.

    Attributes:
        tenant: on whose behalf: among tenants, turns are taken.
        since_s: when it came.
        place: where it is; "out" before it came and after it left.
    """

    tenant: str
    since_s: float
    place: Literal["out", "waiting", "in"] = "out"


class Admission:
    """Lets in at most `most_in_flight` at once; at most `most_waiting` others wait.

    Who is next: tenants take turns, and within one tenant it is first come, first served.  So a request with k of its
    own tenant before it is let in after at most (k + 1) * T - 1 others, where T is the most tenants that ever wait.

    Who is refused when too many wait: the latest of the tenant with the most, the newcomer's own among equals.  So a
    tenant that floods the queue takes no place from others.

    Args:
        most_in_flight: how many may be in.
        most_waiting: how many others may wait.

    Attributes:
        in_flight: those that are in.
        waiting: those that wait.
        last_wait_s: how long the last that was let in had waited.
    """

    def __init__(self, most_in_flight: float, most_waiting: int) -> None:
        self.in_flight = 0
        self.waiting = 0
        self.last_wait_s = 0.0
        self._most_in_flight = most_in_flight
        self._most_waiting = most_waiting
        self._queues: OrderedDict[str, OrderedDict[Ticket, None]] = OrderedDict()  # the first tenant is next

    def enter(self, ticket: Ticket) -> Ticket | None:
        """A request comes: it is let in, waits, or somebody is refused.

        Returns:
            who is refused, the newcomer or one that has waited; None if nobody.
        """
        if self.in_flight < self._most_in_flight:  # then nobody waits
            self._let_in(ticket, ticket.since_s)
            return None
        self._queues.setdefault(ticket.tenant, OrderedDict())[ticket] = None
        self.waiting += 1
        ticket.place = "waiting"
        if self.waiting <= self._most_waiting:
            return None
        refused = self._surplus(ticket.tenant)
        self._take_out(refused)
        return refused

    def leave(self, ticket: Ticket, now_s: float) -> Ticket | None:
        """A request has ended, or waits no longer.

        Returns:
            who is let in instead; None if nobody is.
        """
        if ticket.place == "waiting":
            self._take_out(ticket)
            return None
        assert ticket.place == "in"
        ticket.place = "out"
        self.in_flight -= 1
        return self._next(now_s)

    def resize(self, most_in_flight: float, most_waiting: int, now_s: float) -> list[Ticket]:
        """Go by other bounds: who is in stays, and so does who waits.

        Returns:
            who is let in by that.
        """
        self._most_in_flight = most_in_flight
        self._most_waiting = most_waiting
        return list(iter(lambda: self._next(now_s), None))

    def overdue(self, before_s: float) -> list[Ticket]:
        """Take out those that have waited since before then."""
        late = [ticket for queue in self._queues.values() for ticket in _older(queue, before_s)]
        for ticket in late:
            self._take_out(ticket)
        return late

    def _next(self, now_s: float) -> Ticket | None:
        if not self._queues or self.in_flight >= self._most_in_flight:
            return None
        tenant, queue = next(iter(self._queues.items()))
        ticket = next(iter(queue))
        self._take_out(ticket)
        if tenant in self._queues:
            self._queues.move_to_end(tenant)
        self._let_in(ticket, now_s)
        return ticket

    def _let_in(self, ticket: Ticket, now_s: float) -> None:
        ticket.place = "in"
        self.in_flight += 1
        self.last_wait_s = now_s - ticket.since_s

    def _take_out(self, ticket: Ticket) -> None:
        queue = self._queues[ticket.tenant]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.tenant]
        self.waiting -= 1
        ticket.place = "out"

    def _surplus(self, newcomer: str) -> Ticket:
        queue = max(self._queues.values(), key=len)  # looks at all, but only where too many wait
        own = self._queues[newcomer]
        return next(reversed(own if len(own) == len(queue) else queue))


class Gate:
    """Makes requests wait for their turn.

    Args:
        admission: the rule.
        timeout_s: how long a request may wait.

    Attributes:
        admission: the rule, to be read.
    """

    def __init__(self, admission: Admission, timeout_s: float) -> None:
        self.admission = admission
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._closed = False

    async def enter(self, tenant: str) -> Ticket:
        """Wait for a turn; being cancelled, the request waits no longer.

        Raises:
            RefusedError: too many wait, the wait took too long, or the gateway is stopping.
        """
        if self._closed:
            raise _stopping()
        ticket = Ticket(tenant, self._loop.time())
        refused = self.admission.enter(ticket)
        if refused is ticket:
            raise self._full()
        if refused is not None:
            self._tell(refused, self._full())
        if ticket.place == "waiting":
            await self._wait(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """A request that was let in has ended."""
        admitted = self.admission.leave(ticket, self._loop.time())
        if admitted is not None:
            self._tell(admitted)

    def resize(self, most_in_flight: float, most_waiting: int, timeout_s: float) -> None:
        """Go by other bounds."""
        self._timeout_s = timeout_s
        for ticket in self.admission.resize(most_in_flight, most_waiting, self._loop.time()):
            self._tell(ticket)

    def expire(self, now_s: float) -> None:
        """Refuse those that have waited for too long."""
        for ticket in self.admission.overdue(now_s - self._timeout_s):
            self._tell(ticket, self._refusal(f"the request waited {self._timeout_s:g} s", "queue_timeout"))

    def close(self) -> None:
        """Refuse those that wait, and all that come."""
        self._closed = True
        for ticket in self.admission.overdue(math.inf):
            self._tell(ticket, _stopping())

    async def _wait(self, ticket: Ticket) -> None:
        turn = self._turns[ticket] = self._loop.create_future()
        try:
            await turn
        except asyncio.CancelledError:
            if ticket.place != "out":  # its turn may have come in the same moment
                self.leave(ticket)
            raise
        finally:
            del self._turns[ticket]

    def _tell(self, ticket: Ticket, refused: RefusedError | None = None) -> None:
        turn = self._turns[ticket]
        if turn.done():  # its client has just left; `_wait` is about to see that
            return
        if refused is None:
            turn.set_result(None)
        else:
            turn.set_exception(refused)

    def _full(self) -> RefusedError:
        return self._refusal("too many requests wait", "queue_full")

    def _refusal(self, message: str, code: str) -> RefusedError:
        return _unavailable(f"{message}; ask again later", code, self.admission.last_wait_s)


def _stopping() -> RefusedError:
    return _unavailable("the gateway is stopping", "stopping", 1)


def _unavailable(message: str, code: str, retry_s: float) -> RefusedError:
    return RefusedError(503, message, "unavailable_error", code=code, headers=[retry_after(retry_s)])


def _older(queue: OrderedDict[Ticket, None], before_s: float) -> Iterator[Ticket]:
    return itertools.takewhile(lambda ticket: ticket.since_s < before_s, queue)
