"""One HTML file that needs nothing else: no script, no font, no picture from anywhere.

Every text is escaped here; figures are SVG made by `svg`, which escapes its own.  The page follows the
reader's choice of light or dark.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from coterie.errors import InputError
from coterie.files import replacing
from coterie.report.tables import Table, printable

SERIES_LIGHT = ("#2a78d6", "#1baf7a", "#eda100", "#008300", "#4a3aa7", "#e34948", "#e87ba4", "#eb6834")
SERIES_DARK = ("#3987e5", "#199e70", "#c98500", "#2fa32f", "#9085e9", "#e66767", "#d55181", "#d95926")


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph.

    Attributes:
        text: its words.
        strong: whether it is what the reader should see first.
    """

    text: str
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list.

    Attributes:
        items: its entries.
    """

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing.

    Attributes:
        svg: the drawing, as `svg.draw` gives it.
        caption: what it shows.
    """

    svg: str
    caption: str


Part = Text | Bullets | Table | Figure


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page under one heading.

    Attributes:
        title: the heading.
        parts: what is under it, in order.
    """

    title: str
    parts: tuple[Part, ...]


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Assemble a page.

    The same arguments give the same bytes: there is no date in it.
    """
    body = "\n".join(_section(section) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{_escaped(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<header><h1>{_escaped(title)}</h1><p class="note">{_escaped(subtitle)}</p></header>
{body}
</main>
</body>
</html>
"""


def write(path: str | os.PathLike[str], page: str) -> None:
    """Write a page; what was there is replaced at once or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    target = Path(path)
    try:
        with replacing(target) as unfinished:
            unfinished.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None


def _section(section: Section) -> str:
    parts = "\n".join(_part(part) for part in section.parts)
    return f"<section><h2>{_escaped(section.title)}</h2>\n{parts}\n</section>"


def _part(part: Part) -> str:
    match part:
        case Text():
            opening = '<p class="strong">' if part.strong else "<p>"
            return f"{opening}{_prose(part.text)}</p>"
        case Bullets():
            return f"<ul>{''.join(f'<li>{_prose(item)}</li>' for item in part.items)}</ul>"
        case Figure():
            return f"<figure>{part.svg}<figcaption>{_escaped(part.caption)}</figcaption></figure>"
        case Table():
            return _table(part)


def _escaped(text: str) -> str:
    return escape(printable(text))


def _prose(text: str) -> str:
    """Escaped, with what is between backticks set as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", _escaped(text))


def _table(table: Table) -> str:
    marks = [' class="figure"' if right else "" for _, right in table.headings]
    head = "".join(f"<th{mark}>{_escaped(name)}</th>" for mark, (name, _) in zip(marks, table.headings, strict=True))
    rows = "\n".join(
        f"<tr>{''.join(f'<td{mark}>{_escaped(cell)}</td>' for mark, cell in zip(marks, row, strict=True))}</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{_prose(table.note)}</p>' if table.note else ""
    return (
        f'<div class="table"><table><caption>{_escaped(table.title)}</caption><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table>{note}</div>"
    )


def _variables(ground: str, ink: str, muted: str, line: str, tint: str, series: Sequence[str]) -> str:
    named = {"ground": ground, "ink": ink, "muted": muted, "line": line, "tint": tint}
    numbered = {f"series-{i}": colour for i, colour in enumerate(series)}
    return " ".join(f"--{name}: {colour};" for name, colour in {**named, **numbered}.items())


_LIGHT = _variables("#fcfcfb", "#1c1c1a", "#6b6a65", "#dddcd6", "#f1f0ec", SERIES_LIGHT)
_DARK = _variables("#1a1a19", "#e9e8e3", "#a3a29b", "#3d3c39", "#262624", SERIES_DARK)
_STYLE = f"""
:root {{ {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1080px; margin: 0 auto; padding: 24px 32px 64px; }}
h1 {{ font-size: 26px; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 19px; font-weight: 600; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }}
p, ul {{ max-width: 76ch; margin: 8px 0; }}
.note, caption, figcaption {{ color: var(--muted); font-size: 13.5px; }}
.strong {{ font-size: 18px; font-weight: 600; padding: 12px 16px; background: var(--tint); border-radius: 6px; }}
.table {{ display: inline-block; vertical-align: top; margin: 12px 32px 12px 0; max-width: 100%; overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }}
caption {{ text-align: left; padding-bottom: 4px; }}
th, td {{ text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--line); overflow-wrap: break-word; }}
th {{ font-weight: 600; vertical-align: bottom; }}
.figure {{ text-align: right; white-space: nowrap; }}
figure {{ display: inline-block; vertical-align: top; margin: 12px 24px 12px 0; max-width: 100%; overflow-x: auto; }}
figure svg {{ display: block; max-width: max(100%, 640px); height: auto; }}
figcaption {{ max-width: 60ch; }}
@media (max-width: 640px) {{
main {{ padding: 16px 16px 48px; }}
.table, figure {{ margin-right: 0; }}
.note, figcaption {{ position: sticky; left: 0; max-width: calc(100vw - 32px); }}
}}
"""
