"""Who a process is: its id, and when it started, so that no later process of the same id is taken for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = 0xFFFFFFFF  # the lower 32 bits of the starting time, in clock ticks since the machine started
_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h, a flag of the main thread


def own_identity() -> int:
    """64 bits: process id, starting time."""
    me = _look(os.getpid())
    assert me is not None
    return os.getpid() << 32 | me.started


def is_alive(identity: int) -> bool:
    """Whether the process still runs; one that is suspended does, one that only its parent still knows (zombie) not.

    Both must see the same process ids: containers that share memory must share their process namespace.
    """
    return (seen := _seen(identity)) is not None and not seen.over


def is_ending(identity: int) -> bool:
    """Whether the process does not run, or its main thread has begun to end, so that there is nothing to wait for.

    The system frees a process's memory before it says that it is over, which takes seconds where that is a model's
    weights.  Another of its threads may go on for a moment, so that this is no proof of death.
    """
    return (seen := _seen(identity)) is None or seen.over or seen.ending


class _Seen(NamedTuple):
    started: int
    over: bool
    ending: bool


def _seen(identity: int) -> _Seen | None:
    """What the system says of the process; None if there is none, or only a later one of its id."""
    seen = _look(identity >> 32)
    return seen if seen and seen.started == identity & _TICKS else None


def _look(process: int) -> _Seen | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold anything (man 5 proc)
    return _Seen(int(fields[18]) & _TICKS, state in "ZX", bool(int(fields[5]) & _EXITING))
