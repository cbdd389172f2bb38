"""TPOT over time, and how long a change of the cluster or of the traffic is felt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.errors import ConfigError
from coterie.sim.outcomes import Outcomes
from coterie.sim.spec import Change
from coterie.sim.workload import Drift

WINDOW_S = 5.0
_BEFORE = 4
_FELT = 1.05


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that ended in a stretch of time.

    Attributes:
        start_s: its beginning; it ends where the next begins.
        finished: requests that had their last token in it.
        failed: requests that failed in it.
        tpot_p50_ms: median time per output token of those that finished; None where none had two tokens.
        tpot_p99_ms: its 99th percentile.
    """

    start_s: float
    finished: int
    failed: int
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None


def windows(outcomes: Outcomes, width_s: float = WINDOW_S) -> tuple[Window, ...]:
    """Whole windows from the end of the warm-up until the last arrival; what follows is a cluster that empties.

    A request counts where it ends, so a change shows fully only after as long as a request takes.

    Args:
        outcomes: of a simulation.
        width_s: of each.

    Raises:
        ConfigError: the width is not above zero.
    """
    if not (math.isfinite(width_s) and width_s > 0):
        raise ConfigError(f"windows: the width must be above zero, got {width_s}")
    count = max(0, math.floor((outcomes.last_arrival_s - outcomes.since_s) / width_s))
    edges = outcomes.since_s + width_s * np.arange(count + 1)
    ends, failures = np.asarray(outcomes.end_s), np.asarray(outcomes.failed_s)
    cuts, failed = np.searchsorted(ends, edges), np.searchsorted(failures, edges)  # both in order of time
    tpots = np.asarray(outcomes.tpot_s)
    found = []
    for i in range(count):
        own = tpots[cuts[i] : cuts[i + 1]]
        p50, p99 = _percentiles_ms(own[~np.isnan(own)])
        found.append(Window(float(edges[i]), len(own), int(failed[i + 1] - failed[i]), p50, p99))
    return tuple(found)


def _percentiles_ms(tpots_s: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
    if not tpots_s.size:
        return None, None
    p50, p99 = 1000 * np.percentile(tpots_s, (50, 99))
    return float(p50), float(p99)


@dataclass(frozen=True, slots=True)
class Event:
    """Something after which TPOT may be another.

    Attributes:
        time_s: when.
        what: in a few words.
    """

    time_s: float
    what: str


def events_of(changes: Sequence[Change], drift: Drift | None) -> tuple[Event, ...]:
    """Changes of the cluster and of the mix, in order of time; what is so from the start is none."""
    of_cluster = [Event(change.time_s, f"{change.worker} {change.kind}") for change in changes if change.time_s > 0]
    of_mix = [Event(time_s, "the mix changes") for time_s in drift.times_s[1:]] if drift else []
    return tuple(sorted(of_cluster + of_mix, key=lambda event: event.time_s))


@dataclass(frozen=True, slots=True)
class Recovery:
    """How an event was felt.

    Attributes:
        time_s: of the event.
        what: it was.
        before_ms: median of the P50 of the last four windows before it, or of those since the event before.
        worst_ms: highest P50 of a window between it and the next event.
        after_s: seconds from the event to the end of the last window whose P50 is more than 5 % above `before_ms`; 0
            where there is none; None where it lasts until the next event or the end, or nothing is known of before.
    """

    time_s: float
    what: str
    before_ms: float | None
    worst_ms: float | None
    after_s: float | None


def recoveries(found: Sequence[Window], events: Sequence[Event], width_s: float = WINDOW_S) -> tuple[Recovery, ...]:
    """What became of P50 after each event; events of one moment are one.

    Args:
        found: windows of a run.
        events: in order of time.
        width_s: of the windows.
    """
    times = sorted({event.time_s for event in events})
    edges = [-math.inf, *times, math.inf]
    return tuple(
        _recovery(
            Event(time_s, ", ".join(event.what for event in events if event.time_s == time_s)),
            [w for w in found if edges[i] <= w.start_s and w.start_s + width_s <= time_s][-_BEFORE:],
            [w for w in found if time_s < w.start_s + width_s <= edges[i + 2]],
            width_s,
        )
        for i, time_s in enumerate(times)
    )


def _recovery(event: Event, before: Sequence[Window], after: Sequence[Window], width_s: float) -> Recovery:
    known = [w.tpot_p50_ms for w in before if w.tpot_p50_ms is not None]
    later = [(w.start_s + width_s, w.tpot_p50_ms) for w in after if w.tpot_p50_ms is not None]
    before_ms = float(np.median(known)) if known else None
    worst_ms = max((p50 for _, p50 in later), default=None)
    felt = [end_s for end_s, p50 in later if before_ms is not None and p50 > _FELT * before_ms]
    if before_ms is None or not later or (felt and felt[-1] == later[-1][0]):
        after_s = None
    else:
        after_s = felt[-1] - event.time_s if felt else 0.0
    return Recovery(event.time_s, event.what, before_ms, worst_ms, after_s)
