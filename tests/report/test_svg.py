import sys
from xml.etree import ElementTree

import pytest

from coterie.errors import UnsupportedError
from coterie.report import svg


def picture(text="a label"):
    def paint(figure):
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=svg.SERIES[1])
        axes.set_title(text)

    return svg.draw("what <it> shows", (3, 2), paint)


def test_the_same_drawing_is_the_same_bytes_without_a_date():
    assert picture() == picture()
    assert "<metadata>" not in picture()


def test_text_stays_text_and_colours_are_the_pages():
    drawn = picture()
    assert "a label</text>" in drawn
    assert "var(--series-1)" in drawn
    assert "currentColor" in drawn
    assert "#a1b2" not in drawn


@pytest.mark.parametrize("label", ["$\\frac{1$", "<script>&amp;", "--> <b>", "日本語 \u05d0"])
def test_a_label_is_only_text(label):
    drawn = ElementTree.fromstring(picture(label))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert label in texts


def test_it_begins_with_what_it_shows():
    assert picture().startswith("<svg")
    assert 'role="img"><title>what &lt;it&gt; shows</title>' in picture()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'coterie\[report\]'"):
        picture()
