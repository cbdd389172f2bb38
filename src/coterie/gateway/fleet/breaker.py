"""When a worker is not to be asked, judged by what became of the last requests; pure, with time as an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens, and for how long.

    Attributes:
        failures: failures in a row that open it; a refused connection does so at once.
        open_s: seconds for which it is open at first.
        most_open_s: seconds to which that grows, doubling each time.
    """

    failures: int
    open_s: float
    most_open_s: float


class Breaker:
    """Keeps requests from a worker that fails them.

        closed --- a refused connection, or `failures` failures in a row --> open
        open ------ its time is over, and somebody takes the trial -------> half-open
        half-open - the trial went well ----------------------------------> closed
        half-open - the trial failed -------------------------------------> open, for twice as long

    A dead worker refuses at once and so looks idle: policies that follow load would send it everything until health
    checks notice.  Once it is open, what becomes of requests that were on their way changes nothing, however many they
    are: only the trial does.  One that opens again soon after its trial went well (within the time for which it was
    open) is open for twice as long, too: the trial did not show what is wrong with it.

    Attributes:
        rules: what it goes by.
        state: where it is.
        until_s: when the trial is due; it has no meaning while closed.
    """

    __slots__ = ("_closed_s", "_failures", "_open_s", "rules", "state", "until_s")

    def __init__(self, rules: BreakerRules) -> None:
        self.state: State = "closed"
        self.until_s = 0.0
        self.rules = rules
        self._failures = 0
        self._open_s = 0.0  # for how long it was open last; 0 if it never was
        self._closed_s = 0.0

    def failed(self, now_s: float, *, refused: bool = False) -> bool:
        """A request failed there; return whether that opened it.

        Args:
            now_s: the time.
            refused: whether the worker did not even take the connection.
        """
        if self.state != "closed":
            return False
        self._failures += 1
        if not refused and self._failures < self.rules.failures:
            return False
        again = self._open_s > 0 and now_s < self._closed_s + self._open_s
        self._open(now_s, 2 * self._open_s if again else self.rules.open_s)
        return True

    def succeeded(self) -> None:
        """A request was served there: whatever failed before is no longer in a row with what fails next."""
        self._failures = 0

    def begin_trial(self, now_s: float) -> bool:
        """Take the trial if it is due and nobody else has; whoever is told True must call `end_trial`."""
        if self.state != "open" or now_s < self.until_s:
            return False
        self.state = "half-open"
        return True

    def end_trial(self, now_s: float, *, well: bool) -> None:
        """Say how the trial went."""
        assert self.state == "half-open"
        if well:
            self.state, self._failures, self._closed_s = "closed", 0, now_s
        else:
            self._open(now_s, 2 * self._open_s)

    def _open(self, now_s: float, for_s: float) -> None:
        self.state = "open"
        self._open_s = min(for_s, self.rules.most_open_s)
        self.until_s = now_s + self._open_s
