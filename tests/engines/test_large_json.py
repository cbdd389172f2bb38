"""Bodies that are cut down: what is left, what is put back, and which texts pass: those that the parser takes."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coterie.engines import json_windows, large
from coterie.engines.json_windows import InvalidJsonError, windows
from coterie.engines.large import Large, cut_down
from coterie.engines.pieces import Pieces

OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def finish(turns: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def pieces(text: bytes, size: int) -> Pieces:
    return Pieces(text[i : i + size] for i in range(0, len(text), size))


def is_valid(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every bound small, so that short texts meet all of them."""
    for name, value in (("_LONG_BYTES", 24), ("_SHORTEST_BYTES", 8), ("_SHOWN_BYTES", 12)):
        monkeypatch.setattr(large, name, value)


TEXTS = st.text(st.sampled_from('ab"\\/\n\té€😀[]{},:1 '), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=6)
WRITTEN = st.builds(
    lambda value, ascii_, indent: json.dumps(value, ensure_ascii=ascii_, indent=indent).encode(),
    OBJECTS,
    st.booleans(),
    st.sampled_from([None, 1]),
)
SIZES = st.integers(1, 40)


def broken(text: bytes, at: int, what: int, by: bytes) -> bytes:
    at %= len(text) + 1
    return (text[:at] + by + text[at:], text[:at] + text[at + 1 :], text[:at] + by + text[at + 1 :], text[:at])[what]


BROKEN = st.builds(
    broken,
    WRITTEN,
    st.integers(0, 400),
    st.integers(0, 3),
    st.sampled_from(
        [
            b"[",
            b"]",
            b"{",
            b"}",
            b",",
            b":",
            b'"',
            b"\\",
            b"\\u",
            b"\\ud83d",
            b"0",
            b"-",
            b" ",
            b"\x01",
            b"\xff",
            b"null",
        ]
    ),
)


@given(WRITTEN | BROKEN, SIZES, st.integers(1, 30))
@example(b'{"a":"\\ud83d\\ude00\\ud83d\\ude00"}', 3, 10)
@example(b'{"a":"\\\\\\\\\\"\\\\"}', 4, 9)
@example(b'{"a":"%b"}' % (b"\\\\" * 100), 7, 41)
@example(b'{"a":"%b"}' % (b"\\\\" * 100), 7, 42)
@example(b'{"a":[1,]}', 3, 3)
@example(b'{"a":[,1]}', 3, 3)
@example(b'{"a":1}  ,', 3, 3)
@example(b'{"a":1} {}', 3, 3)
@example(b'{"a" 1}', 3, 3)
@example(b'{"a","b"}', 3, 3)
@example(b'["a":1]', 3, 3)
@example(b'{"a":[1}]', 3, 3)
def test_a_text_is_valid_in_windows_exactly_if_it_is_valid_whole(text: bytes, size: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_windows, "WINDOW_BYTES", window)
        try:
            found = finish(windows(pieces(text, size)))
        except InvalidJsonError:
            assert not is_valid(text)
            return
    assert is_valid(text)
    assert [window.start for window in found] == [0, *(window.stop for window in found[:-1])]
    assert found[-1].stop == len(text)


@given(WRITTEN, SIZES, st.integers(1, 30))
def test_what_is_cut_down_has_the_same_fields_and_is_whole_again_when_completed(
    text: bytes, size: int, window: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_windows, "WINDOW_BYTES", window)
        small, cuts = finish(cut_down(pieces(text, size)))
    assert list(OBJECT.decode(small)) == list(OBJECT.decode(text))
    completed = cuts.completed(small)
    whole = completed if isinstance(completed, bytes) else completed.read(0, len(completed))
    assert json.loads(whole) == json.loads(text)
    assert {name: bytes(value) for name, value in OBJECT.decode(whole).items() if b"{" not in bytes(value)} == {
        name: bytes(value) for name, value in OBJECT.decode(text).items() if b"{" not in bytes(value)
    }


def cut(text: bytes) -> tuple[dict[str, Any], Large]:
    small, cuts = finish(cut_down(pieces(text, 1000)))
    return json.loads(small), cuts


def test_a_long_string_begins_alike_and_is_a_string() -> None:
    left, cuts = cut(b'{"prompt": "' + b"abcdefgh" * 10 + b'", "n": 1}')
    assert left["prompt"].startswith("abcdefgh")
    assert left["n"] == 1
    assert len(cuts.cuts) == 1


@pytest.mark.parametrize(
    ("prompt", "elements"),
    [
        (["a" * 99], 1),
        (["a" * 99, "b"], 2),
        ([[1, 2] * 30], 1),
        ([[1, 2] * 30, [4]], 2),
    ],
)
def test_a_list_of_several_strings_or_lists_stays_one_of_several(prompt: list[Any], elements: int) -> None:
    left, _ = cut(json.dumps({"prompt": prompt}).encode())
    assert len(left["prompt"]) == elements


def test_names_in_objects_are_all_kept_and_escaped_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_LONG_BYTES", 300)
    inner = b'{"pad": "%b", "kv_transfer_params": {"a": "%b"}, "\\u006bv": 1}' % (b"x" * 400, b"y" * 400)
    left, _ = cut(b'{"vllm_xargs": %b}' % inner)
    assert set(left["vllm_xargs"]) == {"pad", "kv_transfer_params", "kv"}


def test_an_object_too_large_to_be_looked_into_becomes_what_no_reader_of_an_object_takes() -> None:
    members = b", ".join(b'"name %d": %d' % (i, i) for i in range(50))
    left, cuts = cut(b'{"vllm_xargs": {%b}}' % members)
    assert isinstance(left["vllm_xargs"], str)
    completed = cuts.completed(json.dumps(left).encode())
    assert isinstance(completed, Pieces)
    assert len(json.loads(completed.read(0, 9999))["vllm_xargs"]) == 50


def test_of_a_name_given_twice_the_last_counts_whichever_is_long() -> None:
    left, _ = cut(b'{"a": "%b", "a": 1}' % (b"x" * 50))
    assert left["a"] == 1
    left, _ = cut(b'{"a": 1, "a": "%b"}' % (b"x" * 50))
    assert left["a"].startswith("x")


@pytest.mark.parametrize("text", [b"[1]", b'"a"', b"7", b" ", b"null"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidJsonError):
        finish(cut_down(Pieces([text])))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b'{"a": %b1}' % (b" " * 150_000), "white space"),
        (b'{"a": %b}' % (b"1" * 150_000), "a number"),
        (b"[" * 2000 + b"]" * 2000, "no|not"),
        (b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}", "recursion|nested"),
        (b"{%b}" % b",".join(b'"%d":0' % i for i in range(5000)), "fields"),
        (b"{%b}" % b",".join(b'"%d":"%b"' % (i, b"x" * 30) for i in range(300)), "long"),
    ],
)
def test_texts_that_would_take_too_long_to_look_through_are_refused(text: bytes, what: str) -> None:
    with pytest.raises(InvalidJsonError, match=what):
        finish(cut_down(Pieces([text])))


def test_a_span_of_pieces_is_the_same_bytes_and_copies_nothing() -> None:
    parts = [b"abc", b"", b"defg", b"h"]
    body = Pieces(parts)
    assert len(body) == 8
    assert all(body.read(i, j) == b"abcdefgh"[i:j] for i in range(9) for j in range(i, 9))
    assert body.span(0, 8)[1] is parts[2]
