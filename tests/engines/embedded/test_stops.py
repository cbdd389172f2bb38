"""Stop strings are found wherever a text is cut, and nothing of them is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.embedded.stops import StopFinder

SHORT = st.text("ab", min_size=1, max_size=4)


def by_hand(text, stops):
    """The text before the first stop string, reading one character after the other."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def in_pieces(pieces, stops):
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        text, stop = finder.add(piece)
        shown += text
        if stop is not None:
            assert finder.rest() == ""
            return shown, stop
    return shown + finder.rest(), None


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(SHORT, max_size=3))
def test_where_a_text_is_cut_makes_no_difference(pieces, stops):
    assert in_pieces(pieces, stops) == by_hand("".join(pieces), stops)


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(SHORT, min_size=1, max_size=3))
def test_no_more_is_held_back_than_a_stop_string_may_begin_with(pieces, stops):
    finder, given_so_far, shown = StopFinder(stops), "", ""
    for piece in pieces:
        text, stop = finder.add(piece)
        given_so_far, shown = given_so_far + piece, shown + text
        if stop is not None:
            return
        held = given_so_far[len(shown) :]
        assert given_so_far == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_string_that_ends_before_the_least_length_is_no_stop():
    finder = StopFinder(["ab", "xaby"])
    assert finder.add("xab", armed=False) == ("", None)  # still the beginning of another
    assert finder.add("z") == ("xabz", None)
    assert finder.add("ab") == ("", "ab")


def test_a_string_that_begins_before_the_least_length_and_ends_after_it_is_a_stop():
    finder = StopFinder(["ab"])
    assert finder.add("xa", armed=False) == ("x", None)
    assert finder.add("bc") == ("", "ab")


@pytest.mark.parametrize("piece", ["", "text"])
def test_without_stop_strings_all_is_shown_at_once(piece):
    finder = StopFinder([])
    assert finder.add(piece) == (piece, None)
    assert finder.rest() == ""
