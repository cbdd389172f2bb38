"""What became of the requests: what a simulation keeps of each that is over."""

from __future__ import annotations

import math
from array import array

from coterie.metrics import RequestTimeline


class Outcomes:
    """Counts, 40 bytes of each request that finished, and 8 of each that failed.

    Requests that arrive before `since_s` are left out: they warm the cluster up.

    Attributes:
        since_s: arrivals count from here on.
        arrived: requests that came in.
        last_arrival_s: when the last of all did, so far.
        arrived_s: when each of those that finished came, in order of their ends, as are the other columns.
        ttft_s: their times to first token.
        tpot_s: their times per output token; NaN for those with a single token.
        end_s: when they had their last token.
        position: which of the population each is.
        failed_s: when those that failed did, in order.
    """

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.arrived = 0
        self.last_arrival_s = 0.0
        self.arrived_s, self.ttft_s, self.tpot_s, self.end_s, self.failed_s = (array("d") for _ in range(5))
        self.position = array("q")

    @property
    def failed(self) -> int:
        """Those of the requests that were not served."""
        return len(self.failed_s)

    def arrive(self, time_s: float) -> None:
        """A request came in."""
        self.arrived += time_s >= self.since_s
        self.last_arrival_s = time_s

    def fail(self, arrived_s: float, now_s: float) -> None:
        """One that came at `arrived_s` was not served."""
        if arrived_s >= self.since_s:
            self.failed_s.append(now_s)

    def finish(self, timeline: RequestTimeline, position: int) -> None:
        """The one at this position of the population had its last token."""
        if timeline.sent_s < self.since_s:
            return
        self.arrived_s.append(timeline.sent_s)
        self.ttft_s.append(timeline.ttft_s)
        self.tpot_s.append(math.nan if timeline.tpot_s is None else timeline.tpot_s)
        self.end_s.append(timeline.last_token_s)
        self.position.append(position)
