"""The demo's own figures; the others are those of an inspection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from coterie.report.svg import MUTED, SERIES, draw
from coterie.up.demo.results import DemoResult, PassResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = (10.4, 3.6)
_COLOURS = {
    "round_robin": SERIES[2],
    "least_load": SERIES[7],
    "power_of_two": SERIES[6],
    "domain": SERIES[1],
    "locality": SERIES[0],
}
_Curve = tuple[Sequence[float], Sequence[float]]


def tpot_figure(result: DemoResult) -> str:
    """Share of the requests whose time per output token is at most so long."""

    def curve(passes: Sequence[PassResult]) -> _Curve:
        timelines = [served.timeline for one in passes for served in one.served if served.timeline]
        tpots = np.sort([1000 * timeline.tpot_s for timeline in timelines if timeline.tpot_s is not None])
        shares = np.arange(len(tpots) + 1) / max(1, len(tpots))
        return np.repeat(tpots, 2).tolist(), np.repeat(shares, 2)[1:-1].tolist()  # a step up at each request

    def finish(axes: Axes) -> None:
        axes.set_ylim(0, 1)
        axes.set_xlim(left=0)
        axes.set_xlabel("time per output token, ms")

    return _by_mix("Time per output token", "share of the requests", result, curve, finish)


def active_figure(result: DemoResult) -> str:
    """Experts read by a step of a decode engine, over the first round."""

    def curve(passes: Sequence[PassResult]) -> _Curve:
        points = [(s.at_s, s.counted.active / s.counted.steps) for s in passes[0].samples if s.counted.steps]
        return [at for at, _ in points], [active for _, active in points]

    def finish(axes: Axes) -> None:
        axes.axhline(result.trace.geometry.experts, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_ylim(0, result.trace.geometry.experts * 1.05)
        axes.set_xlabel("seconds since the round began")

    return _by_mix("Active experts over time", "experts per layer and step", result, curve, finish)


def _by_mix(
    title: str,
    axis: str,
    result: DemoResult,
    curve: Callable[[Sequence[PassResult]], _Curve],
    finish: Callable[[Axes], None],
) -> str:
    """One panel a mix, one line a policy."""
    cells = _cells(result)
    mixes = list(dict.fromkeys(mix for mix, _ in cells))

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, len(mixes), sharex=True, sharey=True, squeeze=False)[0]
        for axes, mix in zip(panels, mixes, strict=True):
            for policy, colour in _COLOURS.items():
                x, y = curve(cells[mix, policy])
                axes.plot(x, y, color=colour, linewidth=2.2 if policy == "locality" else 1.3, label=policy)
            axes.set_title(f"{mix} mix", loc="left", fontsize=10)
            axes.grid(axis="y")
        for axes in panels:  # they share their axes, so limits are for when all is drawn
            finish(axes)
        panels[0].set_ylabel(axis)
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))

    return draw(title, _WIDE, paint)


def _cells(result: DemoResult) -> Mapping[tuple[str, str], Sequence[PassResult]]:
    def cell(one: PassResult) -> tuple[str, str]:
        return one.planned.mix, one.planned.policy

    in_order = sorted(result.passes, key=lambda one: (*cell(one), one.planned.repeat, one.planned.round))
    cells = {key: list(some) for key, some in groupby(in_order, cell)}
    return {cell(one): cells[cell(one)] for one in result.passes}


def band_figure(result: DemoResult) -> str:
    """Among how many engines load decided, under locality."""
    cells = {mix: passes for (mix, policy), passes in _cells(result).items() if policy == "locality"}
    bands = {
        mix: Counter(where.band for one in passes for where in one.routed.values()) for mix, passes in cells.items()
    }
    sizes = range(result.profile.clusters + 1)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for i, (mix, counts) in enumerate(bands.items()):
            shares = [counts[size] / max(1, counts.total()) for size in sizes]
            places = [size + (i - (len(bands) - 1) / 2) * 0.38 for size in sizes]
            drawn = axes.bar(places, shares, width=0.34, color=SERIES[i], label=f"{mix} mix")
            axes.bar_label(drawn, [f"{share:.0%}" if share else "" for share in shares], fontsize=8.5)
        axes.set_xticks(sizes, ["no signal", *map(str, sizes[1:])])
        axes.set_ylim(0, 1.1)
        axes.set_xlabel("decode engines in the band")
        axes.set_ylabel("share of the decisions")
        axes.legend(loc="upper right")

    return draw("Sizes of the locality band", (5.2, 3.4), paint)
