"""Give threads that poll without pause the lowest priority.

NIXL's progress thread polls UCX in a loop: its Python binding sets the loop's delay to zero, and vLLM offers
no option.  Each engine with NIXL so keeps one core busy while it is idle.  Servers have cores to spare; a
laptop with fewer cores than engines starves the model's own threads.  At the lowest priority the loop still
runs whenever a core is free, which is when transfers wait for it.

That holds within a session: Linux shares the processor between sessions first (`sched_autogroup`), whatever the
priorities in them.  So supervised processes stay in the session of their supervisor.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_LOWEST = 19
_SAMPLE_S = 1.0
_BUSY_SHARE = 0.2


def lower_polling_threads(group: int, sample_s: float = _SAMPLE_S) -> int:
    """Lower the priority of the threads of an idle process group that are busy all the same.

    Main threads are left alone: they do the work that the process is there for.

    Args:
        group: process group id.
        sample_s: how long to watch.

    Returns:
        Number of threads that were lowered.
    """
    before = _helper_ticks(group)
    time.sleep(sample_s)
    busy = _BUSY_SHARE * sample_s * os.sysconf("SC_CLK_TCK")
    polling = [thread for thread, ticks in _helper_ticks(group).items() if ticks - before.get(thread, ticks) >= busy]
    for thread in polling:
        with contextlib.suppress(ProcessLookupError):  # it ended since
            os.setpriority(os.PRIO_PROCESS, thread, _LOWEST)
    return len(polling)


def polling_cpu_s(group: int) -> float:
    """CPU seconds that the threads which `lower_polling_threads` lowered have used."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(_fields(stat)[2]) == group:
                threads = [_fields(task / "stat") for task in (stat.parent / "task").iterdir()]
                ticks += sum(int(one[11]) + int(one[12]) for one in threads if int(one[16]) == _LOWEST)
    return ticks / os.sysconf("SC_CLK_TCK")


def _helper_ticks(group: int) -> dict[int, int]:
    """CPU ticks of each thread of the group that is not a main thread."""
    ticks = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(_fields(process / "stat")[2]) != group:
                continue
            for task in (process / "task").iterdir():
                if task.name != process.name:
                    fields = _fields(task / "stat")
                    ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    return ticks


def _fields(stat: Path) -> list[str]:
    return stat.read_text(errors="replace").rpartition(")")[2].split()
