"""Press Ctrl-C at many moments of a small demo, once or twice, and look for what is left.

    .venv/bin/python scripts/interrupt_demo.py

A line for each moment, and exit status 1 if a process, a segment of shared memory or a file was left at any.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from coterie.shm import FOLDER

ROOT = Path(__file__).parents[1]
CLUSTER = f"""
model: {ROOT}/models/coterie-tiny
served_model_name: coterie-tiny
engine: embedded
prefill: {{count: 1, args: [--kv-memory, "64"]}}
decode: {{count: 2, args: [--pad-intermediate, "1024", --kv-memory, "32"]}}
run_dir: run
"""
SIZE = ("--requests", "24", "--concurrency", "24", "--max-tokens", "8", "--rounds", "1")
PROMPTS = ROOT / "examples/demo"
FILES = ("--calibrate", "calibrate.jsonl", "--serve", f"{PROMPTS}/serve.jsonl")
COMMAND = (sys.executable, "-m", "coterie", "demo", "--cluster", "cluster.yaml", *SIZE, *FILES, "--json", "result.json")
MARK = "COTERIE_INTERRUPT_DEMO"
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Moment:
    """When to press Ctrl-C: `delay_s` after the demo says `line` (or began), and again after `again_s`, if given."""

    line: str
    delay_s: float
    again_s: float | None = None

    def __str__(self) -> str:
        again = "" if self.again_s is None else f", again {self.again_s:g} s later"
        return f"{self.delay_s:g} s after {self.line or 'the beginning'!r}{again}"


FIRST, LAST = "serving 1.1 even round_robin", "serving 1.1 skewed locality"
MOMENTS = (
    *(Moment("", delay_s) for delay_s in (0.05, 0.2, 0.5, 0.9, 1.3)),
    *(Moment("decode-1: starting", delay_s) for delay_s in (0.0, 0.3, 1.0)),
    Moment("prefill-0: ready", 0.0),
    *(Moment(line, delay_s) for line in ("collecting", "fitting", "starting gateways") for delay_s in (0.0, 0.5)),
    Moment("warming up prefill", 0.05),
    Moment(FIRST, 0.1),
    *(Moment(LAST, delay_s) for delay_s in (0.1, 0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.5)),
    *(Moment("decode-1: starting", 0.3, again_s) for again_s in (0.05, 0.3)),
    Moment("starting gateways", 0.4, 0.1),
    *(Moment(FIRST, 0.2, again_s) for again_s in (0.02, 0.2, 0.6)),
)


def main() -> int:
    """Try all moments; whether something was left."""
    left = [moment for moment in MOMENTS if not leaves_nothing(moment)]
    print(f"{len(MOMENTS)} moments, something left at {len(left)}")
    return bool(left)


def leaves_nothing(moment: Moment) -> bool:
    """Try one."""
    before = segments()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cluster.yaml").write_text(CLUSTER)
        few = (PROMPTS / "calibrate.jsonl").read_text().splitlines(keepends=True)[::8]
        Path(folder, "calibrate.jsonl").write_text("".join(few))
        value = str(time.monotonic_ns())
        status, took_s = interrupted(folder, moment, {**os.environ, MARK: value})
        files = {path.name for path in Path(folder).rglob("*") if path.is_file()} - {"cluster.yaml", "calibrate.jsonl"}
        found = [*processes(f"{MARK}={value}"), *(segments() - before), *(files - {"result.json"})]
    complete = " (it had finished)" if status == 0 else ""
    print(f"{moment}: ended with {status} after {took_s:.1f} s{complete}, left {found or 'nothing'}", flush=True)
    return not found


def interrupted(folder: str, moment: Moment, environment: dict[str, str]) -> tuple[int, float]:
    """Exit status, and how long the demo took to end."""
    with subprocess.Popen(
        COMMAND, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stderr
        if moment.line:
            next((line for line in demo.stderr if line.startswith(moment.line)), None)
        threading.Thread(target=demo.stderr.read).start()  # so that it never waits for a reader
        time.sleep(moment.delay_s)
        began_s = time.monotonic()
        demo.send_signal(signal.SIGINT)
        if moment.again_s is not None:
            time.sleep(moment.again_s)
            demo.send_signal(signal.SIGINT)
        return demo.wait(PATIENCE_S), time.monotonic() - began_s


def segments() -> set[str]:
    """Shared memory that nobody holds, see `coterie.shm`."""
    found = set()
    for path in Path(FOLDER).glob("coterie-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # locked: it belongs to a living process
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.add(path.name)
    return found


def processes(mark: str) -> list[str]:
    """Living processes that inherited a variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it ended since it was listed, or is another user's
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
