#!/usr/bin/env python3
"""Tokens in a second with 1, 2, 3 and 4 expert servers of a known capacity, and with one of four lost.

    python3 bench/expert_scaling.py [--pairs-per-s 1600] [--seconds 8] [--json]

Each server computes so many pairs of token and expert in a second and no more, as if it had a machine of its own.  Two
client processes have four calls of 16 tokens in flight each.  Experts are on two servers where there are as many.
Then, with four servers: one is killed, started again, drained, and started again; what clients get is counted over the
same time after each.  Capacity is pairs in a second over experts of a token, for each server that serves.  "Idle" is
what of the cores nobody used meanwhile: where it is near 0, servers were short of a machine, and not of their pace.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from coterie.model_config import read_model_config
from coterie.up.config import ExpertsConfig
from coterie.up.experts_command import expert_shares
from expert_world import TINY, ProcessWorld

TOKENS, IN_FLIGHT, CLIENTS = 16, 4, ("c0", "c1")
SETTLE_S = 1.0


class Rates:
    """What clients of a world get."""

    def __init__(self, world: ProcessWorld, pairs_per_s: float, seconds: float) -> None:
        self._world, self._seconds = world, seconds
        self._tokens_per_server_s = pairs_per_s / read_model_config(TINY).geometry.top_k

    def row(self, name: str) -> dict[str, Any]:
        """Counted over so many seconds from now on."""
        time.sleep(SETTLE_S)
        before, began_s, ticks = self._done(), time.monotonic(), idle_and_all()
        time.sleep(self._seconds)
        rate = (self._done() - before) * TOKENS / (time.monotonic() - began_s)
        capacity = self._tokens_per_server_s * sum(self._world.runs(server) for server in self._world.servers)
        idle, every = (now - then for now, then in zip(idle_and_all(), ticks, strict=True))
        last = [client.last for client in self._world.clients.values()]
        return {
            "with": name,
            "tokens/s": round(rate),
            "of capacity": round(rate / capacity, 3),
            "idle": round(idle / every, 2),
            "failed": sum(len(one["failed"]) for one in last),
            "wrong": sum(one["wrong"] for one in last),
        }

    def _done(self) -> int:
        return sum(client.last["done"] for client in self._world.clients.values())


def idle_and_all() -> tuple[int, int]:
    """Ticks of all cores since the machine started; see `man 5 proc_stat`."""
    ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks[:8])


def world(servers: int, pairs_per_s: float, folder: str) -> ProcessWorld:
    shares = expert_shares(ExpertsConfig(servers, replicas=min(2, servers)), str(TINY))
    return ProcessWorld(
        Path(folder),
        servers={f"s{number}": share for number, share in enumerate(shares)},
        clients=CLIENTS,
        load=(TOKENS, IN_FLIGHT),
        options=("--pairs-per-s", str(pairs_per_s)),
    )


def rows(pairs_per_s: float, seconds: float) -> Iterator[dict[str, Any]]:
    for count in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder, world(count, pairs_per_s, folder) as running:
            rates = Rates(running, pairs_per_s, seconds)
            yield rates.row(f"{count} servers")
            if count == 4:
                for what, name in (("kill", "one killed"), ("start", "it is back"), ("drain", "one drained")):
                    running.play(what, "s1")
                    if what == "drain":
                        running.processes["s1"].wait()
                    if what != "kill":
                        running.until_known()
                    yield rates.row(name)
                running.play("start", "s1")
                running.until_known()
                yield rates.row("it is back, too")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs-per-s", type=float, default=1600)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for row in rows(options.pairs_per_s, options.seconds):
        print(
            json.dumps(row) if options.json else "   ".join(f"{key} {value}" for key, value in row.items()), flush=True
        )


if __name__ == "__main__":
    main()
