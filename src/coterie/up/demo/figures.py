"""The demo's own figures; the others are those of an inspection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from coterie.report.svg import MUTED, SERIES, draw
from coterie.routing import DECODE_POLICIES
from coterie.up.demo.results import DemoResult, PassResult, expert_aware

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
_DASHES = ("-", "--", ":")
_BANDED = ("locality", "locality_refit")
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
    aware = expert_aware(result.policies)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, len(result.mixes), sharex=True, sharey=True, squeeze=False)[0]
        for axes, mix in zip(panels, result.mixes, strict=True):
            for policy in result.policies:
                colour, dashes = line_of(policy)
                x, y = curve(cells[mix, policy])
                width = 2.2 if policy in aware else 1.3
                axes.plot(x, y, color=colour, linestyle=dashes, linewidth=width, label=policy)
            axes.set_title(f"{mix} mix", loc="left", fontsize=10)
            axes.grid(axis="y")
        for axes in panels:  # they share their axes, so limits are for when all is drawn
            finish(axes)
        panels[0].set_ylabel(axis)
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))

    return draw(title, _WIDE, paint)


def line_of(policy: str) -> tuple[str, str]:
    """Colour and dashes of one of `DECODE_POLICIES`, whichever others are drawn; no two have both alike."""
    if policy in _COLOURS:
        return _COLOURS[policy], "-"
    free = [colour for colour in SERIES if colour not in _COLOURS.values()]
    others = [other for other in DECODE_POLICIES if other not in _COLOURS]
    number = others.index(policy)
    return free[number % len(free)], _DASHES[number // len(free)]


def _cells(result: DemoResult) -> Mapping[tuple[str, str], Sequence[PassResult]]:
    def cell(one: PassResult) -> tuple[str, str]:
        return one.planned.mix, one.planned.policy

    in_order = sorted(result.passes, key=lambda one: (*cell(one), one.planned.repeat, one.planned.round))
    cells = {key: list(some) for key, some in groupby(in_order, cell)}
    return {cell(one): cells[cell(one)] for one in result.passes}


def banded(result: DemoResult) -> list[str]:
    """Of the result's policies, those where load decides within a band of similarity."""
    return [policy for policy in result.policies if policy in _BANDED]


def band_figure(result: DemoResult) -> str:
    """Among how many engines load decided, a panel for each of the `banded` policies."""
    cells = _cells(result)
    policies = banded(result)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(1, len(policies), sharey=True, squeeze=False)[0]
        for axes, policy in zip(panels, policies, strict=True):
            _paint_bands(axes, {mix: cells[mix, policy] for mix in result.mixes}, result.profile.clusters)
            if len(policies) > 1:
                axes.set_title(policy, loc="left", fontsize=10)
        panels[0].set_ylabel("share of the decisions")
        panels[-1].legend(loc="upper right")

    return draw("Sizes of the locality band", (5.2 * len(policies), 3.4), paint)


def _paint_bands(axes: Axes, passes_of: Mapping[str, Sequence[PassResult]], engines: int) -> None:
    """One group of bars for each size of the band, in it a bar for each mix."""
    sizes = range(engines + 1)
    step = 0.76 / max(2, len(passes_of))
    for i, (mix, passes) in enumerate(passes_of.items()):
        counts = Counter(where.band for one in passes for where in one.routed.values())
        shares = [counts[size] / max(1, counts.total()) for size in sizes]
        places = [size + (i - (len(passes_of) - 1) / 2) * step for size in sizes]
        drawn = axes.bar(places, shares, width=0.9 * step, color=SERIES[i], label=f"{mix} mix")
        axes.bar_label(drawn, [f"{share:.0%}" if share else "" for share in shares], fontsize=8.5)
    axes.set_xticks(sizes, ["no signal", *map(str, sizes[1:])])
    axes.set_ylim(0, 1.1)
    axes.set_xlabel("decode engines in the band")
