"""Where the gateway's CPU goes, for requests of two tokens and for streams.

    python bench/gateway_profile.py [--policy marginal] [--rows 12]

First by shared object, the kernel's part included, as `perf` samples it (left out where there is no `perf`).  Then what
runs in the interpreter by module and function, in a run of its own under cProfile; calls are counted there, which makes
small functions look dearer than they are, so its shares tell what is large and not what would be gained.
"""

from __future__ import annotations

import argparse
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from processes import free_ports, started

from gateway import LOADS, Load, build, command_of, generate, workers, write_profile

PROFILED = (*LOADS["two"][1:], *LOADS["64"])
SOURCE = f"{os.sep}coterie{os.sep}"


def sampled(folder: Path, load: Load, policy: str) -> Counter[str]:
    """Shares of the samples in each shared object."""
    data = folder / "perf.data"
    with workers(folder, load.token_us) as ports:
        (port,) = free_ports(1)
        command = command_of(f"coterie {policy}", folder, ports, port, None)
        with started(command, port, folder / "gateway.log") as gateway:
            perf = subprocess.Popen(["perf", "record", "-q", "-F", "1000", "-p", str(gateway.pid), "-o", data])
            generate(folder, load, port, load.requests)
            perf.terminate()
            perf.wait()
    report = ["perf", "report", "-i", data, "--sort", "dso", "--stdio"]
    output = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in output.splitlines() if line.strip() and not line.startswith("#")]
    return Counter({name.split(".")[0]: float(share.rstrip("%")) for share, name, *_ in lines})


def counted(folder: Path, load: Load, policy: str) -> pstats.Stats:
    """Seconds in each function, as cProfile counts them."""
    file = folder / "calls"
    with workers(folder, load.token_us) as ports:
        (port,) = free_ports(1)
        _, *arguments = command_of(f"coterie {policy}", folder, ports, port, None)
        command = [sys.executable, "-m", "cProfile", "-o", str(file), *arguments]
        with started(command, port, folder / "gateway.log"):
            generate(folder, load, port, load.requests // 4)
    return pstats.Stats(str(file))


def by_place(stats: pstats.Stats) -> tuple[Counter[str], Counter[str]]:
    """Seconds by module and by function; builtins are their callers', the loop's wait is nobody's."""
    modules: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for (file, _, name), (_, _, own_s, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        places = [(file, name, own_s)] if file != "~" else [(by[0], by[2], times[2]) for by, times in callers.items()]
        for place, function, seconds in places:
            if SOURCE in place and "startup" not in place:
                module = place.rpartition(SOURCE)[2]
                modules[module] += seconds
                functions[f"{module} {function}" if file != "~" else f"{module} {function} -> {name}"] += seconds
    return modules, functions


def show(title: str, shares: Counter[str], rows: int) -> None:
    total = sum(shares.values()) or 1.0
    print(f"  {title}")
    for name, share in shares.most_common(rows):
        print(f"    {100 * share / total:5.1f} %  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="marginal")
    parser.add_argument("--rows", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        write_profile(folder / "profile.safetensors")
        for load in PROFILED:
            print(f"{load.name}, {arguments.policy}")
            if shutil.which("perf"):
                show("by shared object", sampled(folder, load, arguments.policy), arguments.rows)
            modules, functions = by_place(counted(folder, load, arguments.policy))
            show("by module", modules, arguments.rows)
            show("by function", functions, arguments.rows)


if __name__ == "__main__":
    main()
