"""The paper's figures, each a list of simulated values beside the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from coterie.published import Figure, Fitted, Published, load_fitted, load_published
from coterie.reproduce.cells import BALANCERS, RATES, Cell, Metric, Plan, Setup, Tell
from coterie.routing import LOAD_POLICIES
from coterie.signature import COUNT_KINDS

_CHANGES: tuple[Metric, ...] = ("tpot_p50", "tpot_p99")
_SPREAD_RATES = (24.0, 40.0, 56.0)  # the ends and the middle of what the paper has


@dataclass(frozen=True, slots=True)
class Line:
    """One value, simulated and published.

    Attributes:
        workload: `task` or `language`; empty if of both.
        model: key of the model; empty if of several.
        setting: what was set.
        against: what a change is measured against; empty if the value is no change.
        metric: what was measured; changes are in per cent.
        simulated: what the simulation gives; None where it cannot tell.
        published: what was published; None where nothing was for this setting.
        low: lower end of what was published, where it is a range.
        high: upper end.
        source: where it was published.
        fitted: whether the simulation's constants were fitted to this very value.
        note: why something is missing; empty if nothing is.
    """

    workload: str
    model: str
    setting: str
    against: str
    metric: str
    simulated: float | None
    published: float | None
    low: float | None
    high: float | None
    source: str
    fitted: bool = False
    note: str = ""

    @property
    def off(self) -> float | None:
        """Simulated less published; from the nearer end of a range, 0 within it."""
        if self.simulated is None:
            return None
        if self.published is not None:
            return self.simulated - self.published
        if self.low is None or self.high is None:
            return None
        return self.simulated - min(max(self.simulated, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A figure.

    Attributes:
        name: as on the command line.
        title: what it shows.
        lines: its values.
        findings: what follows, in sentences.
    """

    name: str
    title: str
    lines: tuple[Line, ...]
    findings: tuple[str, ...] = ()


class Bench:
    """What all figures share: the published values, and cells, each made once.

    Args:
        plan: how everything is simulated.
        tell: is told what is done next.
    """

    def __init__(self, plan: Plan, tell: Tell = lambda _: None) -> None:
        self.published: Published = load_published()
        self.fitted: Fitted = load_fitted()
        self._plan, self._tell = plan, tell
        self._cells: dict[tuple[str, str], Cell] = {}

    def cell(self, workload: str, model: str) -> Cell:
        """The cell of a workload and a model."""
        key = (workload, model)
        if key not in self._cells:
            self._cells[key] = Cell(workload, model, self._plan, self._tell)
        return self._cells[key]

    def cells(self) -> list[Cell]:
        """All six."""
        published = self.published
        return [self.cell(workload, model) for workload in published.workloads for model in published.measured]

    def rows(self, figure: str, **attributes: object) -> list[Figure]:
        """The published rows of a figure with these attributes."""
        return [
            row
            for row in self.published.figures
            if row.figure == figure and all(getattr(row, name) == value for name, value in attributes.items())
        ]


def beside(row: Figure, simulated: float | None, note: str = "") -> Line:
    """A published row with what the simulation gives."""
    given = {name: getattr(row, name) for name in ("workload", "model", "setting", "against", "metric", "source")}
    return Line(
        **given,
        simulated=simulated,
        published=row.value,
        low=row.low,
        high=row.high,
        fitted=row.use == "fit",
        note=note,
    )


# --- inputs --------------------------------------------------------------------------------------------------------


def inputs(bench: Bench) -> Outcome:
    """The published statistics that the constants were fitted to."""
    lines = [
        Line(
            "",
            "",
            check.statistic,
            "",
            _unit(check.target),
            check.fitted,
            check.target,
            None,
            None,
            "fitted.toml",
            True,
        )
        for check in bench.fitted.check
    ]
    return Outcome("inputs", "What the constants were fitted to", tuple(lines))


def _unit(target: float) -> str:
    return "correlation" if abs(target) <= 1 else "per cent"


def round_robin(bench: Bench) -> Outcome:
    """Round robin's TPOT at each rate: the median was fitted to, the tail was not."""
    lines = []
    for row in bench.published.tpot:
        if row.policy == "round_robin":
            found = bench.cell(row.workload, row.model).run(Setup("round_robin", row.rate))
            for metric, fitted in (("tpot_p50_ms", True), ("tpot_p99_ms", False)):
                lines.append(
                    Line(
                        row.workload, row.model, f"{row.rate:g} requests/s", "", metric, getattr(found, metric),
                        getattr(row, metric), None, None, "artifact: main results", fitted,
                    )
                )  # fmt: skip
    return Outcome("round_robin", "TPOT of round robin, in ms", tuple(lines))


# --- main results --------------------------------------------------------------------------------------------------


def main(bench: Bench) -> Outcome:
    """The six cells: changes against the best load balancer at each rate, mean over five rates."""
    lines = [line for cell in bench.cells() for line in _main_lines(bench, cell)]
    return Outcome(
        "main",
        "Change of TPOT against the best load balancer at each rate, mean over five rates",
        tuple(lines),
        tuple(_main_findings(bench, lines)),
    )


def _main_lines(bench: Bench, cell: Cell) -> list[Line]:
    lines = []
    for metric in _CHANGES:
        row = bench.published.figure("main", metric, workload=cell.workload, model=cell.model, setting="locality")
        lines.append(beside(row, cell.mean_change(Setup("locality", 0), BALANCERS, metric)))
        for policy, published in (("locality_refit", "eldr"), ("domain", "domain")):
            simulated = cell.mean_change(Setup(policy, 0), BALANCERS, metric)
            change = artifact_change(bench.published, cell, published, metric)
            lines.append(
                Line(
                    cell.workload, cell.model, policy, BALANCERS, metric, simulated, change, None, None,
                    "artifact: main results",
                )
            )  # fmt: skip
    return lines


def artifact_change(published: Published, cell: Cell, policy: str, metric: Metric) -> float:
    """What `Cell.mean_change` is, of the artifact's figures."""
    value = {
        (row.policy, row.rate): getattr(row, f"{metric}_ms")
        for row in published.tpot
        if (row.workload, row.model) == (cell.workload, cell.model)
    }
    best = {rate: min(value[name, rate] for name in LOAD_POLICIES) for rate in RATES}
    return float(np.mean([100 * (value[policy, rate] / best[rate] - 1) for rate in RATES]))


def _main_findings(bench: Bench, lines: Iterable[Line]) -> list[str]:
    """What the validation asks for."""
    found = {(line.workload, line.model, line.setting, line.metric): line for line in lines}
    cells = [(cell.workload, cell.model) for cell in bench.cells()]
    medians = [found[*cell, "locality", "tpot_p50"] for cell in cells]
    tails = [found[*cell, "locality", "tpot_p99"] for cell in cells]
    published = np.array([line.published for line in medians], dtype=float)
    errors = np.abs(published - np.array([line.simulated for line in medians], dtype=float))
    constant = float(np.abs(published - np.median(published)).mean())
    signs = sum(_number(line.simulated) * _number(line.published) > 0 for line in tails)
    below = [cell for cell in cells if _is_lowest(found, cell)]
    return [
        f"Locality's six P50 changes are off by {errors.mean():.1f} points on average ({constant:.1f} by a constant).",
        f"Locality's mean P50 is below Domain's and every load balancer's in {len(below)} of {len(cells)} cells.",
        f"The sign of locality's P99 change is the published one in {signs} of {len(tails)} cells.",
    ]


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _is_lowest(found: dict[tuple[str, str, str, str], Line], cell: tuple[str, str]) -> bool:
    """Changes are against the best balancer at each rate, so below 0 is below all of them."""
    locality, domain = (_number(found[*cell, policy, "tpot_p50"].simulated) for policy in ("locality", "domain"))
    return locality < min(0.0, domain)


def active(bench: Bench) -> Outcome:
    """Active experts of a decode step, Qwen3-30B-A3B on tasks."""
    lines = [
        beside(row, bench.cell(row.workload, row.model).mean_change(Setup("locality", 0), BALANCERS, "active_experts"))
        for row in bench.rows("active")
    ]
    return Outcome("active", "Change of the active experts of a decode step, mean over five rates", tuple(lines))


# --- ablations, at 60 requests a second ----------------------------------------------------------------------------


def tau(bench: Bench) -> Outcome:
    """Widths of the locality band."""
    return _against_round_robin(
        bench, "tau", "Width of the locality band", lambda row: Setup("locality", 0, tau=float(row.setting.split()[1]))
    )


def balance(bench: Bench) -> Outcome:
    """Clusters of equal size against clusters of any size."""
    return _against_round_robin(
        bench,
        "balance",
        "Balanced and vanilla k-means",
        lambda row: Setup("locality", 0, balanced=row.setting == "balanced"),
    )


def signatures(bench: Bench) -> Outcome:
    """Kinds of signatures."""

    def setup(row: Figure) -> Setup | None:
        kind = next((kind for kind in COUNT_KINDS if kind == row.setting), None)
        return Setup("locality", 0, kind=kind) if kind else None

    return _against_round_robin(
        bench, "signatures", "Kinds of signatures", setup, "made-up requests have counts and no gate probabilities"
    )


def _against_round_robin(
    bench: Bench, name: str, title: str, setup_of: Callable[[Figure], Setup | None], note: str = ""
) -> Outcome:
    lines = []
    for row in bench.rows(name):
        setup, metric = setup_of(row), msgspec.convert(row.metric, Metric)
        if setup is None or row.rate is None:
            lines.append(beside(row, None, note))
        else:
            cell = bench.cell(row.workload, row.model)
            lines.append(beside(row, cell.change(replace(setup, rate=row.rate), row.against, metric)))
    return Outcome(name, f"{title}: change of TPOT against round robin at 60 requests/s", tuple(lines))


# --- other clusters ------------------------------------------------------------------------------------------------


def topology(bench: Bench) -> Outcome:
    """More or fewer decode workers."""
    lines = [
        beside(
            row,
            bench.cell(row.workload, row.model).mean_change(
                Setup("locality", 0, topology=row.setting), BALANCERS, msgspec.convert(row.metric, Metric)
            ),
        )
        for row in bench.rows("topology")
    ]
    return Outcome("topology", "Decode workers: change of TPOT against the best load balancer", tuple(lines))


def experts_spread(bench: Bench) -> Outcome:
    """Qwen3-235B-A22B on 2P8D, with the experts of a decode worker on four GPUs.

    Which workload was served is not published, and no time of a step: see `ATTRIBUTION.md` for what is assumed.
    """
    lines = []
    for row in bench.rows("ep"):
        for workload in bench.published.workloads:
            cell, metric = bench.cell(workload, row.model), msgspec.convert(row.metric, Metric)
            for placed, setting in ((True, "placed by decode worker"), (False, "in blocks")):
                setup = Setup("locality", 0, topology="2P8D", expert_ranks=4, placed=placed)
                change = cell.mean_change(setup, BALANCERS, metric, _SPREAD_RATES)
                lines.append(replace(beside(row, change), workload=workload, setting=f"locality, experts {setting}"))
    return Outcome("ep", "Qwen3-235B on 2P8D with four GPUs each: change against the best load balancer", tuple(lines))


def prefix_cache(bench: Bench) -> Outcome:
    """Locality beside a prefix cache."""
    lines = []
    for row in bench.rows("prefix_cache"):
        cached = 10**9 if row.setting == "cache on" else 0  # what the pool's prompts need, and more
        assert row.rate is not None
        setup = Setup("locality_refit", row.rate, topology="1P16D", cache_tokens=cached)
        change = bench.cell(row.workload, row.model).change(setup, row.against, msgspec.convert(row.metric, Metric))
        lines.append(replace(beside(row, change), setting=f"{row.setting}, {row.rate:g} requests/s"))
    return Outcome("prefix_cache", "Prefix cache, 1P16D: change of TPOT against round robin", tuple(lines))


FIGURES: dict[str, Callable[[Bench], Outcome]] = {
    "inputs": inputs,
    "round_robin": round_robin,
    "main": main,
    "active": active,
    "tau": tau,
    "balance": balance,
    "signatures": signatures,
    "topology": topology,
    "ep": experts_spread,
    "prefix_cache": prefix_cache,
}
"""Every figure that can be simulated, by its name on the command line."""
