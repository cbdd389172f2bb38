"""What it costs to be ready to go on with streams: the gateway with and without, on mock workers.

    python bench/continuation.py [--rounds 5]

Both run in the same rounds, in turn, with the mock workers and the load generator of bench/gateway.py.  CPU is that of
the gateway's process alone; the table gives medians, with the lowest and highest round.  The ratio is that of the
medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from processes import free_ports, started

from gateway import LOADS, Load, build, command_of, measure, show, summarise, workers, write_profile

ON = "coterie round_robin"
OFF = f"{ON} --no-continue-streams"
STREAMS = [*LOADS["64"], Load("512 streams", "stream.json", 512, 1024, 20000)]  # of the second, several events at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        write_profile(folder / "profile.safetensors")
        for _ in range(arguments.rounds):
            with workers(folder, STREAMS[0].token_us) as ports:
                for contender in (OFF, ON):
                    (port,) = free_ports(1)
                    command = command_of(contender, folder, ports, port, None)
                    with started(command, port, folder / "contender.log") as process:
                        rows += [(contender, load.name, measure(folder, load, port, process.pid)) for load in STREAMS]
    table = summarise(rows)
    print(f"{arguments.rounds} rounds on {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    show(table)
    cost = {(row["load"], row["contender"]): row["cpu_us_per_chunk"]["median"] for row in table}
    for load in STREAMS:
        print(f"{load.name}: {cost[load.name, ON] / cost[load.name, OFF]:.2f} of the CPU for a chunk")


if __name__ == "__main__":
    main()
