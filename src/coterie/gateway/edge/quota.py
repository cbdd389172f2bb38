"""How much one key may ask for: a rule without a clock, told what time it is."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.gateway.edge.keys import Key

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Excess:
    """Why a request is more than its key may ask for.

    Attributes:
        limit: the limit's name, as in the key file.
        value: what it is set to.
        retry_after_s: when to ask again, in seconds.
    """

    limit: str
    value: int
    retry_after_s: float


class Allowance:
    """A bucket that holds what may be used in a minute, and fills steadily.

        level(t) = min(per_minute, level(t0) + (t - t0) * per_minute / 60)

    What is taken may be more than there is: the debt must be made good before anything else is given.  So no more
    than `2 * per_minute` is given in any one minute, but for what the last to be let in takes beyond it.

    Args:
        per_minute: what it holds.
        now_s: when it is made, full.
    """

    __slots__ = ("_level", "_per_minute", "_since_s")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._since_s = now_s

    def take(self, amount: float, now_s: float) -> None:
        """Take `amount`, whether it is there or not."""
        self._level = self._at(now_s) - amount
        self._since_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until at least `amount` will be there; 0 if it is."""
        return max(0.0, (amount - self._at(now_s)) * _MINUTE_S / self._per_minute)

    def _at(self, now_s: float) -> float:
        return min(self._per_minute, self._level + (now_s - self._since_s) * self._per_minute / _MINUTE_S)


class Quota:
    """What one key has used.

    A request is let in if the key has fewer than `max_in_flight` under way, a whole request is left of
    `requests_per_minute`, and a token is left of `tokens_per_minute`.  How many tokens a request costs is known only
    when it has ended: they are taken then, and may put the key in debt.

    Args:
        key: whose.
        now_s: the time of its first request.
    """

    __slots__ = ("_key", "_requests", "_tokens", "in_flight")

    def __init__(self, key: Key, now_s: float) -> None:
        self.in_flight = 0
        self._key = key
        self._requests = _allowance(key.requests_per_minute, now_s)
        self._tokens = _allowance(key.tokens_per_minute, now_s)

    def enter(self, now_s: float) -> Excess | None:
        """Count a request as under way, or say why it may not be."""
        excess = self._excess(now_s)
        if excess is None:
            self.in_flight += 1
            if self._requests is not None:
                self._requests.take(1, now_s)
        return excess

    def leave(self, tokens: int, now_s: float) -> None:
        """A request that was let in has ended, and used `tokens`."""
        self.in_flight -= 1
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)

    def _excess(self, now_s: float) -> Excess | None:
        key = self._key
        if key.max_in_flight is not None and self.in_flight >= key.max_in_flight:
            return Excess("max_in_flight", key.max_in_flight, 1.0)
        for limit, allowance in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens)):
            if allowance is not None and (wait_s := allowance.wait_s(1, now_s)):
                return Excess(limit, getattr(key, limit), wait_s)
        return None


def _allowance(per_minute: int | None, now_s: float) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute, now_s)
