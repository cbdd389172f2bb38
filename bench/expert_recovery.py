#!/usr/bin/env python3
"""How long a call takes that meets a server's death: real processes, killed at random moments under load.

    python3 bench/expert_recovery.py [--kills 100] [--seed 0] [--json]

Four servers hold the experts of models/coterie-tiny, each expert on two of them, and a monitor knows them.  This
process is their client and computes without pause.  A random server gets SIGKILL; the time from then, or from the
beginning of the call if that is later, to the end of the call that met the death is the recovery; "seen" is the time
until the client knows.  The server is started again, and serves, before the next kill.  All sums are compared with
those of experts in this process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coterie.experts.client import Connector, MonitoredDirectory, RemoteExperts, RoutingTable, Server
from coterie.modeling.expert_tensors import ExpertFiles
from expert_client import TOLERANCE, inputs, with_sums
from expert_world import TINY, ProcessWorld
from fault_scripts import SERVERS

DEADLINE_S = 10.0


class NotingDirectory:
    """The monitor's directory, and when the client saw a server's end, if it did since that was reset."""

    def __init__(self, directory: MonitoredDirectory) -> None:
        self._directory = directory
        self.seen_s: float | None = None

    def table(self) -> RoutingTable:
        """As the directory has it."""
        return self._directory.table()

    def await_newer(self, table: RoutingTable, until_s: float) -> None:
        """As the directory has it."""
        self._directory.await_newer(table, until_s)

    def doubt(self, server: Server, *, gone: bool) -> None:
        """Note it, and tell the directory."""
        if gone and self.seen_s is None:
            self.seen_s = time.monotonic()
        self._directory.doubt(server, gone=gone)


class Client(threading.Thread):
    """Computes without pause until `over` is set."""

    def __init__(self, monitor: str) -> None:
        super().__init__(daemon=True)
        files = ExpertFiles.open(TINY)
        geometry, hidden = files.model.geometry, files.model.hidden
        self.calls = list(with_sums(files, inputs(geometry, hidden)))
        fingerprint = files.fingerprint()
        directory = MonitoredDirectory(monitor, geometry, fingerprint, "bench")
        directory.await_all(time.monotonic() + DEADLINE_S)
        self.directory = NotingDirectory(directory)
        self.experts = RemoteExperts(geometry, hidden, self.directory, Connector(fingerprint))
        self.over = threading.Event()
        self.meeting: list[tuple[float, ...]] = []  # of calls that met a death: beginning, when it was seen, end
        self.durations_s: list[float] = []
        self.wrong = 0

    def run(self) -> None:
        """As a thread has it."""
        turn = 0
        while not self.over.is_set():
            (layer, rows, ids, weights), expected = self.calls[turn % len(self.calls)]
            turn, self.directory.seen_s, began_s = turn + 1, None, time.monotonic()
            sums = self.experts.compute(layer, rows, ids, weights, began_s + DEADLINE_S)
            ended_s = time.monotonic()
            self.durations_s.append(ended_s - began_s)
            self.wrong += bool(np.abs(sums - expected).max() > TOLERANCE * np.abs(expected).max())
            if self.directory.seen_s is not None:
                self.meeting.append((began_s, self.directory.seen_s, ended_s))


def kill_one(world: ProcessWorld, client: Client, rng: random.Random) -> tuple[float, float] | None:
    """Seconds until the death was seen, and to the recovery; None if no call met it before the monitor told of it."""
    victim = rng.choice(list(SERVERS))
    time.sleep(rng.uniform(0.05, 0.15))
    before, killed_s = len(client.meeting), time.monotonic()
    world.processes[victim].kill()
    world.processes[victim].wait()
    time.sleep(0.5)
    met = client.meeting[before:]
    world.play("start", victim)
    world.until_known()
    if not met:
        return None
    began_s, seen_s, ended_s = met[0]
    return seen_s - max(killed_s, began_s), ended_s - max(killed_s, began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ProcessWorld(Path(folder), clients=()) as world:
        client = Client(world.url)
        client.start()
        rng = random.Random(options.seed)  # noqa: S311 - moments and victims, no secrets
        found = [kill_one(world, client, rng) for _ in range(options.kills)]
        alive = client.is_alive()
        client.over.set()
        client.join()
    seen_ms, recoveries_ms = 1000 * np.array([one for one in found if one is not None]).T
    report = {
        "kills": options.kills,
        "met by a call": len(recoveries_ms),
        "seen p50 ms": round(float(np.percentile(seen_ms, 50)), 1),
        "seen p99 ms": round(float(np.percentile(seen_ms, 99)), 1),
        "recovery p50 ms": round(float(np.percentile(recoveries_ms, 50)), 1),
        "recovery p99 ms": round(float(np.percentile(recoveries_ms, 99)), 1),
        "recovery max ms": round(float(recoveries_ms.max()), 1),
        "call p50 ms": round(1000 * float(np.median(client.durations_s)), 2),
        "calls": len(client.durations_s),
        "wrong sums": client.wrong,
        "failed calls": 0 if alive else 1,  # the first one ends the client
    }
    print(json.dumps(report) if options.json else "\n".join(f"{name:18} {value}" for name, value in report.items()))


if __name__ == "__main__":
    main()
