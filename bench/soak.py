"""A long run under faults: a cluster of real engines at a part of its capacity, and a random fault every few seconds.

    python bench/soak.py [--minutes 30] [--load 0.7] [--every 10] [--seed 1] [--json FILE]

Two prefill and three decode engines (embedded), each behind a fault proxy, and the gateway; arrivals are Poisson at
`--load` times the rate that a calibration without faults found.  Every request is a greedy stream whose text must be
the undisturbed one to the letter, or end with a clear error.  In the end: sent = answered + clear errors, no load
counted, no KV held, no shared memory of killed engines; the gateway's memory and descriptors have not grown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("tests", "tests/faults"))
from fault_cells import BEHAVIOURS, PROCESS_FAULTS, end_of
from fault_cluster import PROMPTS, ROLES, FaultCluster, FaultEngine

from waiting import wait_until

TOKENS = (8, 24, 64, 120)
FAULT_S = (0.5, 5.0)
"""How long a fault lasts, at least and at most."""

CALIBRATE_S = 6.0
CLIENTS = 48
STEADY = 0.25
"""Part of the run after which memory is expected to be flat: caches and pools have filled."""

MEMORY_MIB_PER_HOUR = 40.0
FILL_MIB = 3.0
"""What memory may grow by in all, however fast: in the first minutes pools and the allocator's arenas still fill."""

PATIENCE = {"prefill_timeout_s": 4.0, "first_byte_timeout_s": 4.0, "idle_timeout_s": 4.0}
"""Above what a busy machine takes for a step, so that only what hangs runs into it."""


@dataclass
class Result:
    """What a run showed.

    Attributes:
        rate: requests per second that were sent.
        faults: how often each came.
        ends: how often requests ended so: "served", a status or a code; "cut" or "wrong" are failures of the gateway.
        seconds: of each request that was served.
        memory_mib: of the gateway, once a second.
        descriptors: of the gateway, once a second.
        left: what was left at the end; empty if nothing was.
    """

    rate: float
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """What must not have been; empty for a good run."""
        bad = [f"{self.ends[end]} requests {end}" for end in ("cut", "wrong") if self.ends[end]]
        growth, error = slope_per_hour(self.memory_mib)
        grown_mib = growth * (1 - STEADY) * len(self.memory_mib) / 3600
        if growth - 2 * error > MEMORY_MIB_PER_HOUR and grown_mib > FILL_MIB:
            bad.append(f"memory grows by {growth:.0f} +- {error:.0f} MiB an hour")
        growth, error = slope_per_hour([float(count) for count in self.descriptors])
        if growth - 2 * error > 10:
            bad.append(f"descriptors grow by {growth:.0f} +- {error:.0f} an hour")
        return [*bad, *self.left]


def slope_per_hour(samples: list[float]) -> tuple[float, float]:
    """How fast samples of once a second grow after the first part of a run, and the standard error of that.

    Neighbouring samples are alike, so means of 20 of them are fitted.
    """
    steady = np.array(samples[int(STEADY * len(samples)) :])
    blocks = steady[: len(steady) // 20 * 20].reshape(-1, 20).mean(axis=1)
    if len(blocks) < 3:
        return 0.0, 0.0
    hours = np.arange(len(blocks)) * 20 / 3600
    slope, start = np.polyfit(hours, blocks, 1)
    rest = blocks - (slope * hours + start)
    error = np.sqrt((rest**2).sum() / (len(blocks) - 2) / ((hours - hours.mean()) ** 2).sum())
    return float(slope), float(error)


# --- faults --------------------------------------------------------------------------------------------


class FaultScript(threading.Thread):
    """Breaks one engine after the other, as a seed says, until it is stopped.

    Attributes:
        done: how often each fault came.
        problem: what it could not mend; None if all is well.
    """

    def __init__(self, cluster: FaultCluster, every_s: float, seed: int) -> None:
        super().__init__(name="faults", daemon=True)
        self.done: Counter[str] = Counter()
        self.problem: Exception | None = None
        self._cluster = cluster
        self._every_s = every_s
        self._rng = random.Random(seed)  # noqa: S311
        self._over = threading.Event()

    def run(self) -> None:
        """One fault every so often; each is mended before the next."""
        try:
            while not self._over.wait(self._every_s * self._rng.uniform(0.5, 1.0)):
                engine = self._cluster.engines[self._rng.choice(ROLES)]
                self._once(self._rng.choice(engine), self._rng.choice((*PROCESS_FAULTS, *BEHAVIOURS)))
        except Exception as error:  # a thread's end is seen by nobody
            self.problem = error

    def check(self) -> None:
        """Raise if there are no more faults, since one could not be mended: the rest would show nothing."""
        if self.problem:
            sys.exit(f"a fault could not be mended: {self.problem!r}")

    def finish(self) -> None:
        """Let the present fault be mended, and end."""
        self._over.set()
        self.join()

    def _once(self, engine: FaultEngine, fault: str) -> None:
        self.done[f"{engine.role} {fault}"] += 1
        lasts_s = self._rng.uniform(*FAULT_S)
        if fault in BEHAVIOURS:
            engine.proxy.behaviour = BEHAVIOURS[fault]
            self._over.wait(lasts_s)
            engine.proxy.mend()
        elif fault == "stopped":
            engine.process.signal(signal.SIGSTOP)
            self._over.wait(lasts_s)
            engine.process.signal(signal.SIGCONT)
        else:
            engine.kill()
            self._over.wait(lasts_s if fault == "killed" else 0)
            engine.restart()


# --- load ----------------------------------------------------------------------------------------------


class Load:
    """Clients that each send one greedy stream and compare what comes.

    Attributes:
        kinds: prompts, each with several limits on output tokens.
        texts: the undisturbed text of each kind.
    """

    def __init__(self, cluster: FaultCluster) -> None:
        self._cluster = cluster
        self.kinds = [(prompt, tokens) for prompt in PROMPTS for tokens in TOKENS]
        self.texts = {kind: cluster.ask(*kind).text for kind in self.kinds}

    def one(self, kind: tuple[str, int], ends: Counter[str], seconds: list[float]) -> None:
        """Send a request and note its end."""
        answer = self._cluster.ask(*kind)
        end = end_of(answer, self.texts[kind])
        ends[end] += 1
        if end == "served":
            seconds.append(answer.seconds)

    def capacity(self, seconds: float, rng: random.Random) -> float:
        """Requests per second that clients get who each send the next when they have the last."""
        ends: Counter[str] = Counter()
        end_s = time.monotonic() + seconds

        def client(kinds: list[tuple[str, int]]) -> None:
            for kind in kinds:
                if time.monotonic() > end_s:
                    return
                self.one(kind, ends, [])

        with ThreadPoolExecutor(16) as clients:
            list(clients.map(client, [rng.choices(self.kinds, k=10_000) for _ in range(16)]))
        return ends.total() / seconds

    def arrivals(
        self, rate: float, seconds: float, rng: random.Random, result: Result, tick: Callable[[], None]
    ) -> None:
        """Poisson arrivals, whatever becomes of those before; returns when all have ended."""
        start_s = due_s = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as clients:
            pending = []
            while due_s < start_s + seconds:
                time.sleep(max(0.0, due_s - time.monotonic()))
                pending.append(clients.submit(self.one, rng.choice(self.kinds), result.ends, result.seconds))
                due_s += rng.expovariate(rate)
                tick()
            for one in pending:
                one.result()


class Watch(threading.Thread):
    """Reads the gateway's memory and descriptors once a second."""

    def __init__(self, pid: int, result: Result) -> None:
        super().__init__(name="watch", daemon=True)
        self._pid = pid
        self._result = result
        self._over = threading.Event()

    def run(self) -> None:
        """Read until it is finished."""
        page_mib = os.sysconf("SC_PAGE_SIZE") / 2**20
        while not self._over.wait(1):
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
            self._result.memory_mib.append(pages * page_mib)
            self._result.descriptors.append(len(os.listdir(f"/proc/{self._pid}/fd")))

    def finish(self) -> None:
        """End."""
        self._over.set()
        self.join()


# --- the run -------------------------------------------------------------------------------------------


def soak(folder: Path, minutes: float, load: float, every_s: float, seed: int, show: Callable[[str], None]) -> Result:
    """Run it; `show` is told how far it is."""
    rng = random.Random(seed)  # noqa: S311
    with FaultCluster(folder, **PATIENCE) as cluster:
        clients = Load(cluster)
        capacity = clients.capacity(CALIBRATE_S, rng)
        result = Result(load * capacity)
        show(f"capacity {capacity:.1f} requests/s; {result.rate:.1f} are sent, for {minutes:g} minutes")
        faults, watch = FaultScript(cluster, every_s, seed), Watch(cluster.gateway.pid, result)
        watch.start()
        faults.start()

        def tell() -> None:
            faults.check()
            show(_progress(result, faults))

        clients.arrivals(result.rate, 60 * minutes, rng, result, _every(15.0, tell))
        faults.finish()
        result.left = _left(cluster, faults)
        watch.finish()
        result.faults = faults.done
    return result


def _left(cluster: FaultCluster, faults: FaultScript) -> list[str]:
    faults.check()
    left = []
    for condition, what in (
        (cluster.all_available, "all workers in use"),
        (cluster.nothing_held, "no load counted and no KV held"),
        (lambda: not cluster.stranded_files(), "no shared memory of killed engines"),
    ):
        try:
            wait_until(condition, what, 40)
        except AssertionError as error:
            left.append(str(error))
    return left


def _every(seconds: float, do: Callable[[], None]) -> Callable[[], None]:
    due_s = time.monotonic() + seconds

    def tick() -> None:
        nonlocal due_s
        if time.monotonic() > due_s:
            due_s += seconds
            do()

    return tick


def _progress(result: Result, faults: FaultScript) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in result.ends.most_common())
    memory = f"{result.memory_mib[-1]:.0f} MiB, {result.descriptors[-1]} descriptors" if result.memory_mib else ""
    return f"{faults.done.total()} faults; {ends}; {memory}"


def table(result: Result) -> str:
    """The result as a table of Markdown."""
    growth, error = slope_per_hour(result.memory_mib)
    p50, p99 = np.percentile(result.seconds, (50, 99))
    rows = [
        ("requests sent", f"{result.ends.total()} ({result.rate:.1f} a second)"),
        *((f"... {end}", str(count)) for end, count in result.ends.most_common()),
        ("faults", f"{result.faults.total()} of {len(result.faults)} kinds"),
        ("seconds of a served request, p50 / p99", f"{p50:.2f} / {p99:.2f}"),
        ("gateway's memory, first / last (MiB)", f"{result.memory_mib[0]:.0f} / {result.memory_mib[-1]:.0f}"),
        ("... growth (MiB an hour)", f"{growth:.1f} +- {error:.1f}"),
        ("descriptors, most / last", f"{max(result.descriptors)} / {result.descriptors[-1]}"),
        ("left behind", "; ".join(result.left) or "nothing"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.7, help="part of the capacity that is sent")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end, too
    with tempfile.TemporaryDirectory() as folder:
        show = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        result = soak(Path(folder), options.minutes, options.load, options.every, options.seed, show)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(vars(result), indent=1))
    if problems := result.problems():
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
