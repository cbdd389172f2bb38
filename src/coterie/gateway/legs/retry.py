"""Whether a request that a worker failed is sent elsewhere, and to which leg it goes back; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from coterie.core import Role
from coterie.errors import CoterieError
from coterie.gateway.legs.upstream import Collected, Kind

RETRIED_STATUS = frozenset({502, 503, 504})
"""Answers of a worker that is overloaded or stands before one that is down.  500 may be the request's own fault."""

Reason = Literal[Kind, "status", "nonsense", "too old"]
"""Why a leg failed: a transport error, one of `RETRIED_STATUS`, a prefill reply that names no KV, KV held too long."""


class LegFailed(Exception):  # noqa: N818  (an outcome of a leg; it is answered for or retried, and goes no further)
    """One worker failed one leg of a request.

    Attributes:
        role: which leg.
        worker: its name.
        reason: why, as a metric's label.
        error: what to tell the client if nobody else is asked; None where the worker's own answer is passed on.
        answer: that answer.
        sent: whether the worker had been sent the request.
        begun: whether the client has been sent a byte of the worker's reply.
    """

    def __init__(
        self,
        role: Role,
        worker: str,
        reason: Reason,
        *,
        error: CoterieError | None = None,
        answer: Collected | None = None,
        sent: bool = True,
        begun: bool = False,
    ) -> None:
        super().__init__(f"{worker}: {reason}")
        self.role = role
        self.worker = worker
        self.reason = reason
        self.error = error
        self.answer = answer
        self.sent = sent
        self.begun = begun


def next_leg(failure: LegFailed, *, split: bool) -> Role | None:
    """The leg from which the request goes on; None if it cannot.

    - A failed prefill is done by another prefill worker: it has left nothing behind that anyone was told of.
    - KV still waits at the prefill worker if the decode worker was never reached, or said itself that it would not
      serve (503): another decode worker collects it.
    - A decode worker that was lost later may have collected it, and so may one of which a proxy says that it was lost
      (502, 504): the prompt is computed again.
    - A reply of which the client has seen a part is not begun again.

    Args:
        failure: what happened.
        split: whether the request has a prefill leg.
    """
    if failure.begun:
        return None
    if failure.role == "prefill":
        return "prefill"
    if failure.reason == "too old":
        return "prefill"
    holds = not failure.sent or (failure.answer is not None and failure.answer.status == 503)
    return "decode" if holds or not split else "prefill"


class Budget:
    """Bounds retries over all requests, so that workers in trouble are not asked three times as much.

    Every request pays `SHARE` of a retry; `FREE` retries, and one for each request on its way, can be had on credit.
    So the requests of a worker that is lost are all served by others, and yet retries are at most `SHARE` of requests
    over any longer time.
    """

    SHARE = 0.2
    FREE = 10

    __slots__ = ("_debt",)

    def __init__(self) -> None:
        self._debt = 0.0

    def pay(self) -> None:
        """A request has come."""
        if self._debt:
            self._debt = max(0.0, self._debt - self.SHARE)

    def spend(self, running: int) -> bool:
        """Take one retry if there is one.

        Args:
            running: requests on their way.
        """
        if self._debt >= self.FREE + running:
            return False
        self._debt += 1.0
        return True


_NOBODY: Mapping[Role, frozenset[str]] = {"prefill": frozenset(), "decode": frozenset()}


class Tries:
    """What was tried for one request.

    Attributes:
        failed: who failed it and why, in order.
        avoid: by role, the workers that failed it: not to be asked again while others are there.
    """

    __slots__ = ("avoid", "failed")

    def __init__(self) -> None:
        self.failed: list[LegFailed] = []
        self.avoid = _NOBODY

    def note(self, failure: LegFailed) -> None:
        """Count a failure, and whom not to ask again; KV that grew too old is nobody's fault."""
        self.failed.append(failure)
        if failure.reason != "too old":
            self.avoid = {**self.avoid, failure.role: self.avoid[failure.role] | {failure.worker}}

    def may_go_on(self, failure: LegFailed, available: Iterable[str], retries: int) -> bool:
        """Whether another attempt is allowed, apart from the budget: there must be somebody else to ask.

        Args:
            failure: the last one, already noted.
            available: names of the workers of its role that can be asked now.
            retries: how many there may be.
        """
        return len(self.failed) <= retries and any(name not in self.avoid[failure.role] for name in available)
