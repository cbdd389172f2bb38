import re
from html.parser import HTMLParser

import pytest

from coterie.errors import InputError
from coterie.report.page import Bullets, Figure, Section, Text, render, write
from coterie.report.tables import Table

EVIL = """<script>alert('x')</script> & "quotes" `<b>code</b>`"""


class _Balanced(HTMLParser):
    """Fails on a tag that is closed out of order, or left open."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br", "path", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page):
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser.seen


def test_every_text_is_escaped():
    parts = (
        Text(EVIL, strong=True),
        Bullets((EVIL,)),
        Table(EVIL, (EVIL,), ((EVIL,),), EVIL),
        Figure("<svg></svg>", EVIL),
    )
    page = render(EVIL, EVIL, [Section(EVIL, parts)])
    seen = parse(page)
    assert "script" not in seen
    assert "b" not in seen
    assert page.count("&lt;script&gt;") == 11


def test_words_between_backticks_are_code():
    assert "<code>coterie fit</code>" in render("", "", [Section("", (Text("run `coterie fit` now"),))])


def test_a_page_asks_nothing_of_anyone():
    page = render("t", "s", [Section("a", (Text("b"),))])
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=|url\(|@import|<script|<link", page)
    assert "prefers-color-scheme: dark" in page


def test_figures_stand_to_the_right_in_their_column():
    page = render("", "", [Section("", (Table("t", ("name", ">n"), (("a", "1"),)),))])
    assert '<th>name</th><th class="figure">n</th>' in page
    assert '<td>a</td><td class="figure">1</td>' in page


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "page.html"
    write(target, "old")
    write(target, "neu: ä")
    assert target.read_text(encoding="utf-8") == "neu: ä"
    with pytest.raises(InputError, match=r"missing.page.html: cannot be written"):
        write(tmp_path / "missing" / "page.html", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
