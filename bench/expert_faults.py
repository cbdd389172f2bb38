#!/usr/bin/env python3
"""All fault scripts on real processes, over TCP between hosts or over shared memory, as often as one likes.

    python3 bench/expert_faults.py [--rounds 1] [--shared-memory]

Two clients compute all the time by four servers, each expert on two of them, and compare each sum; a script is done to
the processes (`tests/fault_scripts.py`).  Over TCP each server is in a network namespace of its own, which needs root
and iproute2.  Prints for each script the calls that were done meanwhile; ends with an error as soon as a call fails, a
sum is wrong, or what runs is not known in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from expert_world import Hosts, ProcessWorld, play_and_check
from fault_scripts import CUTS, SCRIPTS, SERVERS
from network_hosts import hub_and_spokes


def done(world: ProcessWorld) -> dict[str, int]:
    """Calls of each client's process."""
    return {name: client.last["done"] for name, client in world.clients.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shared-memory", action="store_true", help="all on this host; no links are cut")
    options = parser.parse_args()
    scripts = SCRIPTS if options.shared_memory else SCRIPTS | CUTS
    with contextlib.ExitStack() as stack:
        folder, hosts = Path(stack.enter_context(tempfile.TemporaryDirectory())), None
        if not options.shared_memory:
            hub, spokes = stack.enter_context(hub_and_spokes(len(SERVERS)))
            hosts = Hosts(hub, dict(zip(SERVERS, spokes, strict=True)))
        world = stack.enter_context(ProcessWorld(folder, hosts=hosts))
        for _ in range(options.rounds):
            for name, script in scripts.items():
                before, began_s = done(world), time.monotonic()
                play_and_check(world, script)
                calls = sum(max(0, now - before[client]) for client, now in done(world).items())
                print(f"{name:70} {time.monotonic() - began_s:6.1f} s {calls:7} calls", flush=True)


if __name__ == "__main__":
    main()
