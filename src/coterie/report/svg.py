"""Drawings by matplotlib as SVG inside a page: text stays text, colours are the page's own.

matplotlib knows no CSS, so it draws in stand-in colours that nothing else uses; they become `currentColor` and
the variables of `page`'s style, which differ between light and dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any, cast

from coterie.errors import UnsupportedError
from coterie.report.page import SERIES_LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#a1b2c0"
MUTED = "#a1b2c1"
LINE = "#a1b2c2"
GROUND = "#a1b2c3"
SERIES = tuple(f"#a1b2d{i:x}" for i in range(len(SERIES_LIGHT)))

_CSS = {
    INK: "currentColor",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    GROUND: "var(--ground)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)},
}
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "coterie",
    "text.parse_math": False,  # labels come from files: a dollar sign in one is no formula
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


def check() -> None:
    """See that drawings can be made, before work is done that needs them.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UnsupportedError(
            "figures need matplotlib, which is not installed; install coterie's extra: pip install 'coterie[report]'"
        ) from None


def draw(title: str, size: tuple[float, float], paint: Callable[[Figure], None]) -> str:
    """Draw a figure.

    The same calls give the same bytes with the same release of matplotlib.

    Args:
        title: what it shows, for those who cannot see it.
        size: width and height in inches; 7.2 by 3.6 fills the width of a laptop's page well.
        paint: puts the axes on the figure; colours are those of this module.

    Returns:
        An `<svg>` element.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    check()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with mpl.rc_context(cast("Any", _STYLE)), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # only measures with that font; browsers have others
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return _inline(stream.getvalue(), title)


def _inline(document: str, title: str) -> str:
    """The element alone, without metadata and names that would repeat on the page, in the page's colours."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    element = re.sub("|".join(_CSS), lambda found: _CSS[found.group()], element)
    head, rest = element.split(">", 1)
    return f'{head} role="img"><title>{escape(title)}</title>{rest}'
