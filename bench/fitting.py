#!/usr/bin/env python3
"""What fitting a profile costs: one assignment beside other exact solvers, whole fits, memory.

    python bench/fitting.py [--full] [--json FILE] [--plots FOLDER]

The counts are made up: each domain favours its own experts, every request mixes its domain with another one.  Whole
fits are `coterie.calibration.fit` as it comes: layer selection, five starts, rho with its interval.  Each runs in a
process of its own, so that its peak memory is its own; below 2000 requests the median of three is shown.  Set
OMP_NUM_THREADS to say how many threads BLAS may use, and run it on a quiet machine.

All solvers of one row get the same similarities, must find the same total, and are timed in CPU time, since none uses
threads.  POT's network simplex is among them where `ot` can be imported.  `--plots` needs matplotlib
(`pip install 'coterie[report]'`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from coterie.activations import ActivationTrace
from coterie.calibration import fit
from coterie.clustering import balanced_assignment
from coterie.core import ModelGeometry, prompt_hash

TOP_K = 8
DOMAINS = 12
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 65  # the last one is never forwarded, so 64 are counted
BLOCK = 250
SOLVED = "Hungarian", "network simplex"
STAGES = "choosing layers", "clustering", "measuring rho"


# --- made-up counts -----------------------------------------------------------------------------------


def made_up_trace(requests: int, layers: int, experts: int, seed: int = 0) -> ActivationTrace:
    rng = np.random.default_rng(seed)
    tastes = rng.gamma(1.0, size=(layers, experts)) * rng.gamma(0.7, size=(DOMAINS, layers, experts))
    tastes = (tastes / tastes.sum(axis=-1, keepdims=True)).astype(np.float32)
    domains = rng.choice(DOMAINS, size=requests, p=rng.dirichlet(np.full(DOMAINS, 3.0)))
    prefill, decode = np.empty((2, requests, layers, experts), np.uint16)
    for first in range(0, requests, BLOCK):
        part = slice(first, first + BLOCK)
        chances = mixed(rng, tastes, domains[part])
        prefill[part] = whole_counts(chances, PROMPT_TOKENS * TOP_K)
        decode[part] = whole_counts(blurred(rng, chances), (OUTPUT_TOKENS - 1) * TOP_K)
    return ActivationTrace(
        model="made-up",
        geometry=ModelGeometry(layers, experts, TOP_K),
        prefill=prefill,
        decode=decode,
        prefill_tokens=np.full(requests, PROMPT_TOKENS),
        prefill_covered=np.full(requests, PROMPT_TOKENS),
        decode_tokens=np.full(requests, OUTPUT_TOKENS),
        decode_covered=np.full(requests, OUTPUT_TOKENS - 1),
        prompt_hashes=tuple(prompt_hash([i]) for i in range(requests)),
        labels=tuple(f"domain {d}" for d in domains),
    )


def mixed(rng: np.random.Generator, tastes: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """`[n, L, E]` chances of each expert: the own domain's, some of another's, and each request's own whims."""
    share = rng.beta(2, 5, size=(len(domains), 1, 1)).astype(np.float32)
    others = rng.integers(DOMAINS, size=len(domains))
    return blurred(rng, (1 - share) * tastes[domains] + share * tastes[others])


def blurred(rng: np.random.Generator, chances: np.ndarray) -> np.ndarray:
    noisy = chances * rng.standard_gamma(2, size=chances.shape, dtype=np.float32)
    noisy /= noisy.sum(axis=-1, keepdims=True)
    capped = np.minimum(noisy, 0.8 / TOP_K)  # no token chooses an expert twice
    return capped + (1 - capped.sum(axis=-1, keepdims=True)) / chances.shape[-1]


def whole_counts(chances: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in proportion to chances that sum to `total` in each layer: differences of rounded sums."""
    ends = np.rint(np.cumsum(chances, axis=-1) * total).astype(np.int32)
    ends[..., -1] = total
    return np.diff(ends, axis=-1, prepend=0)


# --- one assignment -----------------------------------------------------------------------------------


@dataclass
class Assignment:
    """CPU seconds that each solver took for one problem; None where it was left out."""

    requests: int
    clusters: int
    coterie: float
    others: dict[str, float | None] = field(default_factory=dict)

    def ratio(self, solver: str) -> float | None:
        """How many times as long another solver took."""
        other = self.others[solver]
        return None if other is None else other / self.coterie


def first_similarities(requests: int, clusters: int) -> np.ndarray:
    """Cosines of requests to some of them, as in the first round of a start, when most are in the wrong place."""
    counts = made_up_trace(requests, 12, 128).prefill.reshape(requests, -1).astype(np.float64)
    counts /= np.linalg.norm(counts, axis=1, keepdims=True)
    seeds = np.random.default_rng(1).choice(requests, clusters, replace=False)
    return counts @ counts[seeds].T


def cpu_seconds(function: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    took = []
    for _ in range(rounds):
        begin = time.process_time()
        result = function()
        took.append(time.process_time() - begin)
    return statistics.median(took), result


def by_hungarian(slots: np.ndarray) -> float:
    return float(slots[linear_sum_assignment(slots, maximize=True)].sum())


def by_network_simplex(supply: np.ndarray, demand: np.ndarray, cost: np.ndarray) -> float:
    import ot

    return -float((ot.emd(supply, demand, cost, numItermax=10**8) * cost).sum())


def prepared(solver: str, similarity: np.ndarray, capacity: int) -> Callable[[], float]:
    """A call of one solver; what it needs is laid out before the clock starts."""
    if solver == "Hungarian":
        return partial(by_hungarian, np.repeat(similarity, capacity, axis=1))
    rows, clusters = similarity.shape
    spare = clusters * capacity - rows  # one more row, without preference, fills what is left
    cost = np.vstack([-similarity, np.zeros((min(spare, 1), clusters))])
    supply = np.concatenate([np.ones(rows), np.full(min(spare, 1), spare)])
    return partial(by_network_simplex, supply, np.full(clusters, float(capacity)), cost)


def measure_assignment(requests: int, clusters: int, solvers: Sequence[str]) -> Assignment:
    similarity = first_similarities(requests, clusters)
    capacity = -(-requests // clusters)
    took, labels = cpu_seconds(lambda: balanced_assignment(similarity, capacity), 5)
    total = similarity[np.arange(requests), labels].sum()
    result = Assignment(requests, clusters, took, dict.fromkeys(SOLVED))
    for solver in solvers:
        call = prepared(solver, similarity, capacity)
        result.others[solver], other_total = cpu_seconds(call, 1 if requests > 1000 else 3)
        if abs(other_total - total) > 1e-9 * requests:
            raise SystemExit(f"{requests} x {clusters}: {solver} finds {other_total}, coterie {total}")
    return result


# --- whole fits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Of a trace and a fit."""

    requests: int = 1000
    clusters: int = 16
    layers: int = 48
    experts: int = 128


@dataclass(frozen=True)
class Fit:
    """What one fit took: seconds of wall-clock and CPU time, by stage too, and memory in MiB."""

    size: Size
    wall: float
    cpu: float
    stages: dict[str, float]  # those that `fit` reports
    trace_mib: float
    before_mib: float
    peak_mib: float
    layers_kept: int
    cohesion: float


class Stopwatch:
    """Told what is done next; knows how long each stage took."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._name, self._begin = "preparing", time.perf_counter()

    def __call__(self, name: str) -> None:
        """The stage before ends, stage `name` begins."""
        now = time.perf_counter()
        self.stages[self._name] = self.stages.get(self._name, 0.0) + now - self._begin
        self._name, self._begin = name, now


def measure_fit(size: Size) -> Fit:
    trace = made_up_trace(size.requests, size.layers, size.experts)
    before = peak_mib()
    runs = [one_fit(trace, size.clusters) for _ in range(3 if size.requests <= 1000 else 1)]
    wall, cpu, stages, profile = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    trace_mib = (trace.prefill.nbytes + trace.decode.nbytes) / 2**20
    kept = len(profile.transform.layers)
    return Fit(size, wall, cpu, stages, trace_mib, before, peak_mib(), kept, profile.cohesion)


def one_fit(trace: ActivationTrace, clusters: int) -> tuple[float, float, dict[str, float], Any]:
    watch, wall, cpu = Stopwatch(), time.perf_counter(), time.process_time()
    profile = fit(trace, clusters, progress=watch)
    watch("")
    return time.perf_counter() - wall, time.process_time() - cpu, watch.stages, profile


def peak_mib() -> float:
    """Highest resident memory of this process; `ru_maxrss` would begin with that of the process that started it."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) / 1024


def in_processes_of_their_own(sizes: Iterable[Size]) -> Iterable[Fit]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        yield from (pool.submit(measure_fit, size).result() for size in sizes)


# --- what is measured ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Sizes: (requests, clusters, whether Hungarian) of assignments, and of fits by what varies."""

    assignments: list[tuple[int, int, bool]]
    fits: dict[str, list[Size]]

    @property
    def steps(self) -> int:
        """How many things are measured."""
        return len(self.assignments) + len({size for sizes in self.fits.values() for size in sizes})


def make_plan(full: bool) -> Plan:
    assignments = [(500, 16, True), (1000, 16, True), (2000, 16, True), (1000, 64, True), (20_000, 16, False)]
    requests, shapes = [250, 1000, 4000, 20_000], [(12, 64), (24, 128), (48, 128), (94, 128)]
    if full:
        assignments += [(4000, 16, True), (20_000, 64, False)]
        requests, shapes = sorted([*requests, 500, 2000, 10_000]), [*shapes, (58, 256)]
    fits = {
        "requests": [Size(requests=n) for n in requests],
        "clusters": [Size(clusters=k) for k in (4, 8, 16, 32, 64)],
        "dimensions": [Size(layers=layers, experts=experts) for layers, experts in shapes],
    }
    return Plan(sorted(assignments, key=lambda row: row[1::-1]), fits)


def measure(plan: Plan, advance: Callable[[str], None]) -> tuple[list[Assignment], dict[str, list[Fit]]]:
    has_pot = importlib.util.find_spec("ot") is not None
    assignments = []
    for requests, clusters, hungarian in plan.assignments:
        advance(f"assignment, {requests} x {clusters}")
        solvers = [SOLVED[0]] * hungarian + [SOLVED[1]] * has_pot
        assignments.append(measure_assignment(requests, clusters, solvers))
    sizes = list(dict.fromkeys(size for sizes in plan.fits.values() for size in sizes))
    found = {}
    measured = iter(in_processes_of_their_own(sizes))
    for size in sizes:
        advance(f"fit, {size.requests} x {size.layers} x {size.experts}, {size.clusters} clusters")
        found[size] = next(measured)
    return assignments, {name: [found[size] for size in sizes] for name, sizes in plan.fits.items()}


# --- what is shown ------------------------------------------------------------------------------------


def assignment_table(rows: Sequence[Assignment]) -> Table:
    heads = ["N", "K", "coterie ms", *(head for name in SOLVED for head in (f"{name} ms", "ratio"))]
    table = table_of("One assignment, CPU time, all at the same total", heads)
    for row in rows:
        cells = [str(row.requests), str(row.clusters), f"{row.coterie * 1e3:.1f}"]
        for name in SOLVED:
            cells += [number(row.others[name], 1e3), number(row.ratio(name))]
        table.add_row(*cells)
    return table


def fit_table(title: str, rows: Sequence[Fit]) -> Table:
    heads = ["N", "K", "L x E", "wall s", "CPU s", *STAGES, "layers", "trace MiB", "before", "peak"]
    table = table_of(title, heads)
    for row in rows:
        size = row.size
        cells = [str(size.requests), str(size.clusters), f"{size.layers} x {size.experts}"]
        cells += [f"{value:.2f}" for value in (row.wall, row.cpu, *(row.stages[stage] for stage in STAGES))]
        cells += [str(row.layers_kept), *(f"{value:.0f}" for value in (row.trace_mib, row.before_mib, row.peak_mib))]
        table.add_row(*cells)
    return table


def table_of(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.1f}"


SIZE_OF: dict[str, tuple[str, Callable[[Size], int]]] = {
    "requests": ("requests", lambda size: size.requests),
    "clusters": ("clusters", lambda size: size.clusters),
    "dimensions": ("layers x experts", lambda size: size.layers * size.experts),
}


def draw_plots(folder: Path, assignments: Sequence[Assignment], fits: dict[str, list[Fit]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    same = [row for row in assignments if row.clusters == 16]
    lines = {"coterie": [(row.requests, row.coterie) for row in same]}
    for name in SOLVED:
        lines[name] = [(row.requests, took) for row in same if (took := row.others[name]) is not None]
    draw(folder / "assignment.svg", "One assignment to 16 clusters", "requests", "CPU seconds", lines)
    for name, rows in fits.items():
        across, size_of = SIZE_OF[name]
        rows = sorted(rows, key=lambda row: size_of(row.size))
        lines = {"whole fit": [(size_of(row.size), row.wall) for row in rows]}
        for stage in STAGES:
            lines[stage] = [(size_of(row.size), row.stages[stage]) for row in rows]
        draw(folder / f"fit-{name}.svg", f"A whole fit by {name}", across, "wall-clock seconds", lines)


def draw(file: Path, title: str, across: str, up: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "coterie", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, points in lines.items():
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        axes.set(xscale="log", yscale="log", xlabel=across, ylabel=up, title=title)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(file)


def about() -> dict[str, Any]:
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "numpy": np.__version__, "OMP_NUM_THREADS": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more and larger sizes; several minutes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plots", type=Path, help="write SVG plots into this folder")
    arguments = parser.parse_args()
    plan = make_plan(arguments.full)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=plan.steps, completed=-1)
        assignments, fits = measure(plan, lambda step: progress.update(task, description=step, advance=1))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(", ".join(f"{name} {value}" for name, value in about().items()))
    console.print(assignment_table(assignments), *(fit_table(f"Fit by {name}", rows) for name, rows in fits.items()))
    if arguments.json:
        figures = {"about": about(), "assignments": assignments, "fits": fits}
        arguments.json.write_text(json.dumps(figures, default=asdict, indent=1))
    if arguments.plots:
        draw_plots(arguments.plots, assignments, fits)


if __name__ == "__main__":
    main()
