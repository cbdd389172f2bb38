"""The figures of an inspection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.analysis.batches import RANDOM, ActiveExperts
from coterie.analysis.correlation import Correlation
from coterie.analysis.findings import KindQuality, PlottedClusters
from coterie.analysis.usage import DomainUse, LayerSkew
from coterie.quality import LayerSelection
from coterie.report.svg import GROUND, INK, LINE, MUTED, SERIES, draw
from coterie.report.tables import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = (8.4, 3.4)
_HALF = (5.2, 3.2)
_MARKS = "os^Dv"
_MOST_NAME = 24
_MOST_GROUPS = 32  # entries of a legend and rows of a heat map
_NOTHING = "\u200b"  # a space without width
_HEAT = "#3987e5"  # seen as well on light as on dark ground; how much of it is the value

_Row = tuple[str, float, float, float]
"""A name, a value and the ends of its interval."""

_PLACEMENTS = {RANDOM: MUTED, "domain": SERIES[1], "cluster": SERIES[0]}


def active_figure(active: Sequence[ActiveExperts], experts: int) -> str:
    """Active experts by batch size and placement, with intervals and reductions."""
    sizes = sorted({one.batch for one in active})
    names = [name for name in _PLACEMENTS if any(one.placement == name for one in active)]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for i, name in enumerate(names):
            shown = [one for one in active if one.placement == name and one.active]
            places = [sizes.index(one.batch) + (i - (len(names) - 1) / 2) * 0.27 for one in shown]
            _bars(axes, places, shown, name)
        axes.axhline(experts, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(len(sizes) - 0.5, experts, f"all {experts}", ha="right", va="bottom", color=MUTED)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.set_ylim(0, experts * 1.12)
        axes.set_xlabel("requests per batch")
        axes.set_ylabel("active experts per layer and step")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))

    return draw("Active experts by batch size and placement", _WIDE, paint)


def _bars(axes: Axes, places: Sequence[float], shown: Sequence[ActiveExperts], name: str) -> None:
    means = [one.active.value for one in shown if one.active]
    errors = [one.active.high - one.active.value for one in shown if one.active]
    axes.bar(places, means, width=0.24, color=_PLACEMENTS[name], alpha=0.55 if name == RANDOM else 1, label=name)
    axes.errorbar(places, means, yerr=errors, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    for place, one in zip(places, shown, strict=True):
        if one.active and one.reduction:
            text = f"{-one.reduction.value:+.0%}".replace("-", "−")
            axes.text(place, one.active.high, text, ha="center", va="bottom", fontsize=8.5)


def correlation_figure(found: Correlation) -> str:
    """Values of r of prompts with their own and with others' outputs."""
    spreads = {"own output": found.own, "same label": found.same_domain, "another request": found.other}
    shown = [(name, spread.mean, spread.low, spread.high) for name, spread in spreads.items() if spread]
    return _dots("Correlation of prefill and decode", "r of a prompt with ..., 5th to 95th percentile", {"": shown})


def quality_figure(quality: Sequence[KindQuality]) -> str:
    """Values of rho of each kind of signature."""
    whole: list[_Row] = [(one.kind, one.rho.value, one.rho.low, one.rho.high) for one in quality]
    within: list[_Row] = [
        (one.kind, one.within.value, one.within.low, one.within.high) for one in quality if one.within
    ]
    series = {"all pairs": whole, "same label": within} if within else {"all pairs": whole}
    return _dots("rho of each kind of signature", "rho, 95 % interval", series)


def _dots(title: str, axis: str, series: Mapping[str, Sequence[_Row]]) -> str:
    """Values with intervals, a row for each name, a colour for each series."""
    names = list(dict.fromkeys(name for rows in series.values() for name, *_ in rows))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for i, (label, rows) in enumerate(series.items()):
            heights = [names.index(name) + (i - (len(series) - 1) / 2) * 0.28 for name, *_ in rows]
            for height, (_, value, low, high) in zip(heights, rows, strict=True):
                axes.plot([low, high], [height, height], color=SERIES[i], linewidth=2, solid_capstyle="round")
                axes.annotate(
                    f"{value:.2f}", (high, height), (7, 0), textcoords="offset points", va="center", fontsize=8.5
                )
            axes.plot([row[1] for row in rows], heights, "o", color=SERIES[i], markersize=6, label=label)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(min(0.0, *(row[2] for rows in series.values() for row in rows)) - 0.03, 1.12)
        axes.grid(axis="x")
        axes.set_xlabel(axis)
        if len(series) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

    return draw(title, (_HALF[0], 1.3 + 0.36 * len(names) * len(series)), paint)


def selection_figure(selection: LayerSelection) -> str:
    """How rho grows as layers are added, and where it peaks."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        counts = range(1, len(selection.curve) + 1)
        kept = len(selection.layers)
        axes.plot(counts, selection.curve, color=SERIES[0], linewidth=2, marker="o", markersize=4)
        axes.plot(
            [kept], [selection.rho], "o", color=GROUND, markeredgecolor=SERIES[0], markeredgewidth=2, markersize=9
        )
        axes.annotate(
            f"{kept} kept, {selection.rho:.3f}", (kept, selection.rho), (0, 9), textcoords="offset points", ha="center"
        )
        axes.margins(x=0.12, y=0.22)
        _whole_numbers(axes)
        axes.grid(axis="y")
        axes.set_xlabel("layers taken, best next first")
        axes.set_ylabel("rho")

    return draw("Greedy choice of layers", _HALF, paint)


def plot_figure(plot: PlottedClusters) -> str:
    """Signatures in two dimensions, coloured by label, with the centroids."""
    points, centroids = plot.projection.points, plot.projection.centroids
    names, labels = _legend(plot.labels)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for i, name in enumerate(names):
            x, y = points[labels == name].T
            colour, mark = SERIES[i % len(SERIES)], _MARKS[i // len(SERIES) % len(_MARKS)]
            axes.scatter(x, y, s=13, color=colour, marker=mark, linewidths=0, alpha=0.75, label=_short(name))
        axes.scatter(centroids[:, 0], centroids[:, 1], s=170, color=GROUND, edgecolors=INK, linewidths=1.2, zorder=3)
        for k, (x, y) in enumerate(centroids):
            axes.text(x, y, str(k), ha="center", va="center", fontsize=8.5, zorder=4)
        first, second = plot.projection.explained
        axes.set_xlabel(f"first component ({first:.0%} of the variance)")
        axes.set_ylabel(f"second ({second:.0%})")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), markerscale=1.6, ncols=1 + len(names) // 17)

    return draw("Signatures in two dimensions", (8.4, 4.6), paint)


def _legend(labels: Sequence[str]) -> tuple[list[str], Any]:
    """Names for a legend, and the name of each point; labels that are too rare for the legend share one."""
    common = [name for name, _ in Counter(labels).most_common()]
    kept, rest = set(common[:_MOST_GROUPS]), f"{len(common) - _MOST_GROUPS} other labels"
    names = [name if name in kept else rest for name in labels]
    return [*sorted(kept), *([rest] if len(common) > len(kept) else [])], np.array(names, dtype=object)


def use_figure(use: DomainUse) -> str:
    """Heat map of groups and the experts of one layer, experts sorted by the group that uses them most.

    Of many groups it shows those that differ most from the mean.
    """
    apart = np.abs(use.share - use.share.mean(axis=0)).sum(axis=1)
    groups = np.sort(np.argsort(-apart, kind="stable")[:_MOST_GROUPS])
    share = use.share[groups]
    share = share[:, np.lexsort((-share.max(axis=0), share.argmax(axis=0)))]
    names = [_short(use.names[g]) for g in groups]
    some = f"; {len(names)} of {len(use.names)} groups" if len(names) < len(use.names) else ""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.imshow(_shades(share), aspect="auto", interpolation="none")
        axes.set_yticks(range(len(names)), names)
        axes.set_xticks([])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set(visible=True, color=LINE)
        axes.set_xlabel(f"the {share.shape[1]} experts of layer {use.layer}, by the group that uses them most{some}")

    return draw(f"Use of the experts of layer {use.layer}", (8.4, 1 + 0.26 * len(names)), paint)


def _shades(share: Any) -> Any:
    """`[G, E, 4]` bytes: one colour, as opaque as the share is large."""
    shades = np.zeros((*share.shape, 4), dtype=np.uint8)
    shades[..., :3] = [int(_HEAT[i : i + 2], 16) for i in (1, 3, 5)]
    shades[..., 3] = np.rint(255 * share / max(float(share.max()), 1e-12))
    return shades


def difference_figure(use: DomainUse) -> str:
    """How differently groups use the experts of each layer."""
    return _by_layer("Difference of groups by layer", "difference", use.difference)


def skew_figure(skew: Sequence[LayerSkew]) -> str:
    """Gini coefficient of each layer."""
    return _by_layer("Skew by layer", "Gini coefficient", [layer.gini for layer in skew])


def _by_layer(title: str, axis: str, values: Any) -> str:
    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(range(len(values)), values, color=SERIES[0], linewidth=2, marker="o", markersize=4)
        _whole_numbers(axes)
        axes.set_ylim(0, max(1e-9, *values) * 1.15)
        axes.grid(axis="y")
        axes.set_xlabel("layer")
        axes.set_ylabel(axis)

    return draw(title, _HALF, paint)


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def similarity_figure(similarity: Any) -> str:
    """Cosines between centroids."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.imshow(_shades(np.clip(similarity, 0, 1)), interpolation="none")
        axes.set_xlabel("cluster")
        axes.set_ylabel("cluster")
        if len(similarity) <= 16:
            for (i, j), cosine in np.ndenumerate(similarity):
                axes.text(j, i, f"{cosine:.2f}", ha="center", va="center", fontsize=7.5)

    return draw("Cosines between centroids", (5.2, 4.6), paint)


def _short(name: str) -> str:
    """A label that fits a legend; matplotlib leaves out those that begin with an underscore, so none does."""
    text = printable(name) or "(no label)"
    text = f"{_NOTHING}{text}" if text.startswith("_") else text
    return text if len(text) <= _MOST_NAME else f"{text[: _MOST_NAME - 1]}…"
