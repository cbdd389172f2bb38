"""Who a process is: its id, and when it started, so that no later process of the same id is taken for it."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = 0xFFFFFFFF  # the lower 32 bits of the starting time, in clock ticks since the machine started


def own_identity() -> int:
    """64 bits: process id, starting time."""
    started = _started(os.getpid())
    assert started is not None
    return os.getpid() << 32 | started


def is_alive(identity: int) -> bool:
    """Whether the process still runs; one that is suspended does, one that only its parent still knows (zombie) not.

    Both must see the same process ids: containers that share memory must share their process namespace.
    """
    return _started(identity >> 32) == identity & _TICKS


def _started(process: int) -> int | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold anything (man 5 proc)
    return None if state in "ZX" else int(fields[18]) & _TICKS
