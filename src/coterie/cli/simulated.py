"""What `coterie simulate` says: sentences, tables, JSON and the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coterie.report.page import Figure, Part, Section, Text, render
from coterie.report.svg import MUTED, SERIES, draw
from coterie.report.tables import Table, number, percent
from coterie.routing import LOAD_POLICIES
from coterie.sim import Recovery, Row, Window, recoveries, windows
from coterie.sim.cluster import Cluster
from coterie.sim.paired import PairedChange, paired_change
from coterie.sim.timeline import WINDOW_S, Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

COLUMNS = {
    "tpot_p50_ms": "TPOT P50",
    "tpot_p99_ms": "P99",
    "ttft_p50_ms": "TTFT P50",
    "active_experts_mean": "active experts",
    "batch_mean": "batch",
}
COMPARED = ("tpot_p50_ms", "tpot_p99_ms", "active_experts_mean")
_WIDE, _HALF = (8.4, 3.4), (5.2, 3.2)
_POINTS = 201


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """One run.

    Attributes:
        row: its figures.
        tpot_ms: 201 quantiles of TPOT, evenly spaced from the least to the most; empty where there is none.
        windows: TPOT over time.
        recoveries: what became of it after each event.
        shares: each decode worker's share of the requests.
    """

    row: Row
    tpot_ms: npt.NDArray[np.float64]
    windows: tuple[Window, ...]
    recoveries: tuple[Recovery, ...]
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Change:
    """A policy against the load balancer that is best in this figure.

    Attributes:
        rate: requests each second.
        policy: its name.
        figure: a field of `Row`.
        against: the best load balancer: that of the lowest mean over the seeds.
        change: by how much, over the seeds.
    """

    rate: float
    policy: str
    figure: str
    against: str
    change: PairedChange


@dataclass(slots=True)
class Simulated:
    """All runs of a command.

    Attributes:
        title: what was simulated.
        notes: what weakens the figures.
        events: changes of the cluster and of the mix.
        runs: in the order of rates, policies and seeds.
    """

    title: str
    notes: tuple[str, ...]
    events: tuple[Event, ...]
    runs: list[Finished] = field(default_factory=list)

    def add(self, row: Row, cluster: Cluster) -> None:
        """Keep what is reported of a run that has ended."""
        found = windows(cluster.outcomes)
        tpots = 1000 * np.asarray(cluster.outcomes.tpot_s)
        tpots = tpots[~np.isnan(tpots)]
        given = {name: totals.given for name, totals in cluster.leases().items()}
        total = max(sum(given.values()), 1)
        self.runs.append(
            Finished(
                row,
                np.quantile(tpots, np.linspace(0, 1, _POINTS)) if tpots.size else tpots,
                found,
                recoveries(found, self.events),
                {name: count / total for name, count in given.items()},
            )
        )

    @property
    def cells(self) -> dict[tuple[float, str], list[Finished]]:
        """The runs of each rate and policy, in order of their seeds."""
        found: dict[tuple[float, str], list[Finished]] = {}
        for one in self.runs:
            found.setdefault((one.row.rate, one.row.policy), []).append(one)
        return found

    def changes(self) -> list[Change]:
        """Every policy against the best load balancer, where there are several seeds and a balancer."""
        return [change for figure in COMPARED for change in _changes(self.cells, figure)]

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        document: dict[str, Any] = {"rows": [one.row for one in self.runs]}
        if self.events:
            document["timelines"] = [
                {
                    "policy": one.row.policy,
                    "rate": one.row.rate,
                    "seed": one.row.seed,
                    "window_s": WINDOW_S,
                    "windows": one.windows,
                    "recoveries": one.recoveries,
                }
                for one in self.runs
            ]
        if changes := self.changes():
            document["changes"] = changes
        return document


def _changes(cells: Mapping[tuple[float, str], Sequence[Finished]], figure: str) -> Iterator[Change]:
    for rate in dict.fromkeys(rate for rate, _ in cells):
        values = {
            policy: [getattr(one.row, figure) for one in runs] for (at, policy), runs in cells.items() if at == rate
        }
        known = {policy: own for policy, own in values.items() if len(own) > 1 and None not in own}
        balancers = {policy: statistics.fmean(own) for policy, own in known.items() if policy in LOAD_POLICIES}
        if not balancers:
            continue
        best = min(balancers, key=lambda policy: balancers[policy])
        for policy, own in known.items():
            if policy != best:
                yield Change(rate, policy, figure, best, paired_change(own, known[best]))


# --- sentences and tables ------------------------------------------------------------------------------------


def sentences(found: Simulated) -> list[str]:
    """What was simulated, and what weakens the figures."""
    preempted = sum(one.row.preemptions for one in found.runs)
    about = [f"{preempted} times a request was preempted for want of KV."] if preempted else []
    return [found.title, *found.notes, *about, *_spread_over_ranks(found)]


def _spread_over_ranks(found: Simulated) -> list[str]:
    """How evenly the active experts are spread over ranks, where there are several."""
    shares: dict[str, list[float]] = {}
    for one in found.runs:
        active, busiest = one.row.active_experts_mean, one.row.busiest_rank_experts_mean
        if active and busiest and busiest < active:
            shares.setdefault(one.row.policy, []).append(busiest / active)
    told = ", ".join(f"{policy} {percent(statistics.fmean(some))}" for policy, some in shares.items())
    return [f"Of a layer's active experts, the rank with most has, on average: {told}."] if shares else []


def tables(found: Simulated) -> list[Table]:
    """Figures of all policies; their changes against the best balancer; how events were felt."""
    shown = [_figures(found)]
    if changes := found.changes():
        shown.append(_changes_table(changes))
    if found.events:
        shown.append(_recoveries_table(found))
    return shown


def _figures(found: Simulated) -> Table:
    rows = []
    seeds = 1
    for (rate, policy), runs in found.cells.items():
        seeds = len(runs)
        requests, failed = (sum(getattr(one.row, name) for one in runs) for name in ("requests", "failed"))
        means = (number(_mean([getattr(one.row, name) for one in runs])) for name in COLUMNS)
        rows.append((f"{rate:g}", policy, str(requests), str(failed), *means))
    columns = (">rate", "policy", ">requests", ">failed", *(f">{title}" for title in COLUMNS.values()))
    note = "Times in ms.  Active experts: different ones of a layer in a decode step, on average."
    if seeds > 1:
        note += f"  Means over {seeds} seeds; requests are those of all."
    return Table("Policies", columns, tuple(rows), note)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _changes_table(changes: Sequence[Change]) -> Table:
    by_cell: dict[tuple[float, str], dict[str, Change]] = {}
    for one in changes:
        by_cell.setdefault((one.rate, one.policy), {})[one.figure] = one
    rows = [
        (f"{rate:g}", policy, *(_change(of.get(figure)) for figure in COMPARED))
        for (rate, policy), of in by_cell.items()
    ]
    columns = (">rate", "policy", ">TPOT P50", ">P99", ">active experts")
    note = "Mean over seeds, with its 95 % interval.  The best is the one of the lowest mean, figure by figure."
    return Table(
        "Change against the best load balancer", columns, tuple(sorted(rows, key=lambda row: float(row[0]))), note
    )


def _change(one: Change | None) -> str:
    if one is None:
        return "best"
    of = one.change
    return f"{of.mean:+.1%} ({of.low:+.1%} to {of.high:+.1%})"


def _recoveries_table(found: Simulated) -> Table:
    rows = [
        (
            f"{one.row.rate:g}",
            one.row.policy,
            f"{felt.time_s:g}",
            felt.what,
            number(felt.before_ms),
            number(felt.worst_ms),
            number(felt.after_s, 1),
            str(one.row.failed),
        )
        for (_, _), (one, *_) in found.cells.items()
        for felt in one.recoveries
    ]
    columns = (">rate", "policy", ">at s", "event", ">P50 before", ">worst", ">recovered after s", ">failed in all")
    note = (
        f"P50 of TPOT in ms, of requests that ended in {WINDOW_S:g} s.  Recovered: at most 5 % above that of before; "
        "`-` for not before the next event or the end."
    )
    return Table("Changes on the way (first seed)", columns, tuple(rows), note)


# --- the page ------------------------------------------------------------------------------------------------


def page(found: Simulated) -> str:
    """The report as one HTML file; figures are of the first seed.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    first, *notes = sentences(found)
    summary: list[Part] = [Text(note) for note in notes]
    sections = [Section("Policies", (*summary, *tables(found)))]
    for rate in dict.fromkeys(rate for rate, _ in found.cells):
        runs = {policy: runs[0] for (at, policy), runs in found.cells.items() if at == rate}
        sections.append(Section(f"{rate:g} requests a second", tuple(_figures_of(runs, found))))
    return render("Simulated policies", first, sections)


def _figures_of(runs: Mapping[str, Finished], found: Simulated) -> Iterator[Part]:
    yield Figure(_distributions(runs), "TPOT: the share of requests that had at most so many milliseconds per token.")
    yield Figure(_active(runs), "Different experts of a layer that a decode step activates, mean over steps.")
    if all(len(one.windows) > 1 for one in runs.values()):
        marked = "; dashed lines mark changes" if found.events else ""
        yield Figure(_over_time(runs, found.events), f"Median TPOT of requests that ended in {WINDOW_S:g} s{marked}.")
    yield Figure(_shares(runs), "Share of the requests that each decode worker was given, largest first.")
    spread = [
        (policy, percent(min(one.shares.values())), percent(max(one.shares.values()))) for policy, one in runs.items()
    ]
    yield Table("Shares of decode workers", ("policy", ">least", ">most"), tuple(spread))


def _lines(
    title: str,
    size: tuple[float, float],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    labels: tuple[str, str],
    more: Callable[[Axes], object] = lambda axes: None,
) -> str:
    """A line for each policy, in its colour."""

    def paint(figure: Drawing) -> None:
        axes = figure.subplots()
        for i, (name, (x, y)) in enumerate(series.items()):
            axes.plot(x, y, color=SERIES[i % len(SERIES)], linewidth=1.6, label=name)
        more(axes)
        axes.grid(axis="y")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return draw(title, size, paint)


def _distributions(runs: Mapping[str, Finished]) -> str:
    shares = np.linspace(0, 1, _POINTS).tolist()
    series = {policy: (one.tpot_ms.tolist(), shares) for policy, one in runs.items() if one.tpot_ms.size}
    return _lines("Distribution of TPOT", _WIDE, series, ("ms per token", "share of requests"))


def _over_time(runs: Mapping[str, Finished], events: Sequence[Event]) -> str:
    def mark(axes: Axes) -> None:
        for event in events:
            axes.axvline(event.time_s, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))

    series = {}
    for policy, one in runs.items():
        known = [(w.start_s + WINDOW_S, w.tpot_p50_ms) for w in one.windows if w.tpot_p50_ms is not None]
        series[policy] = ([time_s for time_s, _ in known], [p50 for _, p50 in known])
    return _lines("TPOT over time", _WIDE, series, ("seconds", "ms per token, median"), mark)


def _active(runs: Mapping[str, Finished]) -> str:
    values = [one.row.active_experts_mean or 0.0 for one in runs.values()]

    def paint(figure: Drawing) -> None:
        axes = figure.subplots()
        heights = range(len(values))
        axes.barh(heights, values, height=0.6, color=[SERIES[i % len(SERIES)] for i in heights])
        for height, value in zip(heights, values, strict=True):
            axes.annotate(f"{value:.1f}", (value, height), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks(heights, list(runs))
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.set_xlabel("active experts per layer and step")

    return draw("Active experts", (_HALF[0], 1.2 + 0.34 * len(values)), paint)


def _shares(runs: Mapping[str, Finished]) -> str:
    series = {}
    for policy, one in runs.items():
        shares = sorted(one.shares.values(), reverse=True)
        series[policy] = (list(range(1, len(shares) + 1)), shares)

    def begin_at_zero(axes: Axes) -> None:
        axes.set_ylim(bottom=0)

    return _lines("Shares of decode workers", _WIDE, series, ("decode workers by share", "share"), begin_at_zero)
