#!/usr/bin/env python3
"""Peak memory of a command and of all that it starts, with pages that several of them map counted once.

    .venv/bin/python bench/memory.py .venv/bin/coterie demo

The figure is the sum of the processes' proportional set sizes (`Pss` in `/proc/PID/smaps_rollup`), sampled twice a
second; beside it that of their resident set sizes, which counts shared pages once for each process.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

MARK = "COTERIE_BENCH_MEMORY"
PERIOD_S = 0.5
FIGURE = re.compile(r"^(Pss|Rss): +(\d+) kB$", re.MULTILINE)


def sizes(mark: bytes) -> tuple[int, int, int]:
    """Kilobytes of Pss and of Rss, and the number, of the living processes that inherited a variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended since it was listed, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                figures = dict(FIGURE.findall((process / "smaps_rollup").read_text()))
                found.append((int(figures.get("Pss", 0)), int(figures.get("Rss", 0))))
    return sum(pss for pss, _ in found), sum(rss for _, rss in found), len(found)


def main() -> int:
    value = str(time.monotonic_ns())
    peak = (0, 0, 0)
    with subprocess.Popen(sys.argv[1:], env={**os.environ, MARK: value}) as command:
        while command.poll() is None:
            peak = max(peak, sizes(f"{MARK}={value}".encode()))
            time.sleep(PERIOD_S)
    pss, rss, processes = peak
    print(f"peak {pss / 2**20:.2f} GiB in {processes} processes; shared pages counted each time, {rss / 2**20:.2f} GiB")
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
