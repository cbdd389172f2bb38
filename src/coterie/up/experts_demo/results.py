"""What the demo comes to: the time between two events, and what clients saw in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie.up.experts_demo.load import Seen


@dataclass(frozen=True, slots=True)
class Phase:
    """The time from one event to the next.

    Attributes:
        name: what began it.
        from_s: when, since the load began.
        to_s: when it ended.
        tokens_per_s: output tokens of all clients.
        longest_pause_s: the longest time between two tokens of a stream.
        finished: requests that ended well.
        failed: others that ended.
    """

    name: str
    from_s: float
    to_s: float
    tokens_per_s: float
    longest_pause_s: float
    finished: int
    failed: int


def phases(marks: Sequence[tuple[float, str]], end_s: float, seen: Seen) -> list[Phase]:
    """Cut what was seen into phases.

    Args:
        marks: when each began, ascending, and its name.
        end_s: when the last one ended.
        seen: by the clients.
    """
    ends = [at_s for at_s, _ in marks[1:]] + [end_s]
    return [_phase(name, from_s, to_s, seen) for (from_s, name), to_s in zip(marks, ends, strict=True)]


def _phase(name: str, from_s: float, to_s: float, seen: Seen) -> Phase:
    def within(at_s: float) -> bool:
        return from_s <= at_s < to_s

    return Phase(
        name,
        from_s,
        to_s,
        tokens_per_s=seen.rate(from_s, to_s),
        longest_pause_s=max((pause_s for at_s, pause_s in seen.pauses if within(at_s)), default=0.0),
        finished=sum(map(within, seen.finished)),
        failed=sum(within(at_s) for at_s, _ in seen.errors),
    )
