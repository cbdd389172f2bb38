#!/usr/bin/env python3
"""Explore the protocol of the expert servers' slots: every interleaving, with deaths and time-outs at any step.

    python3 bench/expert_protocol.py

Says how many states each setting has; ends with an error and the shortest way to it if a rule of the protocol is broken
or a request or a slot is lost in any of them.  The tests explore smaller settings of the same kind.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "experts"))
from explorer import Explorer, Setting

SETTINGS = {
    "2 clients, 1 slot; two time-outs": Setting(timeouts=2),
    "2 clients, 2 slots; a time-out": Setting(slots=2, timeouts=1, tries=1),
    "2 clients, 2 servers; a time-out": Setting(servers=2, timeouts=1),
    "2 clients, 1 slot; a death of anyone, for good": Setting(deaths=1, restarts=False),
    "2 clients, 1 slot; a client dies and comes again, a time-out": Setting(deaths=1, mortals=("client",), timeouts=1),
    "2 clients, 1 slot; the server dies and comes again": Setting(deaths=1, mortals=("server",)),
    "1 client, 2 servers; one dies and comes again, a time-out": Setting(
        clients=1, servers=2, deaths=1, mortals=("server",), timeouts=1
    ),
    "1 client, 1 slot; three deaths of client or sweeper": Setting(clients=1, deaths=3, mortals=("client", "sweeper")),
    "2 clients, 1 slot; two deaths of client or sweeper, for good": Setting(
        deaths=2, mortals=("client", "sweeper"), restarts=False, tries=1
    ),
}


def main() -> None:
    total = 0
    for name, setting in SETTINGS.items():
        start = time.process_time()
        count = Explorer(setting).explore(limit=3_000_000)
        total += count
        print(f"{count:>9} states in {time.process_time() - start:5.1f} s   {name}", flush=True)
    print(f"{total:>9} states; every request got its reply or a clear failure, no slot was lost")


if __name__ == "__main__":
    main()
