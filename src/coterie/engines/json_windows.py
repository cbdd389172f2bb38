"""Checks a JSON text too large to be parsed at once, window by window, and notes where each lies in its nesting.

A window is made a text of its own: what is open before it is opened in front of it, what is open after it is closed
behind it, and the one parser decides whether it is valid.  So the whole is valid if and only if all windows are:

    {"a": [1, 2, | {"b": "x | yz"}], "c": | 3}
    {"a": [1, 2, 0]}                          stands for the first
          {"": [0, {"b": "x"}]}               for the second
                   {"": [{"": "yz"}], ...     for the third

Windows are cut after a comma or within a string, and never within an escape.  What is open is told by the brackets
outside strings, which are found by splitting at quotes: all of it runs at the speed of C, a window at a time.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from coterie.engines.pieces import Pieces
from coterie.errors import InputError

T = TypeVar("T")
Turns = Generator[None, None, T]
"""Work that stops after each small part of it, so that others get their turn; what it returns is the result."""

WINDOW_BYTES = 32 << 10
MOST_UNCUT_BYTES = 64 << 10
"""Longest number, and longest run of white space."""

MOST_DEPTH = 1000

_CANCELLING = 4
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_CLOSING = bytes.maketrans(b"[{", b"]}")
_RUNS = re.compile(rb"([\[{]*+)([\]}]*+)")
_SPACE = b" \t\r\n"
_TAIL_BYTES = 24
_WHOLE_ESCAPES = re.compile(
    rb"(?:[^\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*+", re.DOTALL
)
_BYTE = re.compile(r" \(byte \d+\)$")
_any = msgspec.json.Decoder(msgspec.Raw)


class InvalidJsonError(InputError):
    """A text is not valid JSON."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the nesting a text is cut.

    Attributes:
        stack: the opening brackets of what is open, outermost first.
        in_string: whether it is within a string.
        last: the last character that is neither white space nor in a string; empty at the start.
    """

    stack: bytes = b""
    in_string: bool = False
    last: bytes = b""

    @property
    def in_key(self) -> bool:
        """Whether it is within a member's name."""
        return self.in_string and self.stack.endswith(b"{") and self.last in (b"{", b",")

    def opened(self) -> bytes:
        """A text that leads here."""
        if not self.stack:
            return b""
        outer = self.stack[:-1].replace(b"{", b'{"":') + self.stack[-1:]
        in_object = self.stack.endswith(b"{")
        if self.in_string:
            return outer + (b'"":"' if in_object and not self.in_key else b'"')
        return outer + (b'"":0,' if in_object else b"0,")

    def closed(self, mark: bytes = b"") -> bytes:
        """A text that leads from here to the end, with a mark in the string that is open, or in a new one."""
        ends = self.stack.translate(_CLOSING)[::-1]
        if self.in_string:
            return mark + (b'":0' if self.in_key else b'"') + ends
        return b'"%b"%b%b' % (mark, b":0" if self.stack.endswith(b"{") else b"", ends)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the text.

    Attributes:
        start: where it begins, in bytes.
        stop: where it ends.
        place: the nesting at its beginning.
        least_depth: least depth of nesting within it.
        plain: whether all of it is within one string.
    """

    start: int
    stop: int
    place: Place
    least_depth: int
    plain: bool


def cut(text: bytes, place: Place) -> tuple[int, Place, int]:
    """Find where a text that begins at `place` can be cut.

    Returns:
        the number of bytes before the cut, 0 if there is none; the place there; the least depth before it.

    Raises:
        InvalidJsonError: a bracket closes what is not open, or too many are open.
    """
    parts = _split_at_quotes(text)
    outside = parts[place.in_string :: 2]
    ends_in_string = (len(parts) + place.in_string) % 2 == 0
    if ends_in_string:
        end = _end_of_whole_escapes(text)
    else:
        quote = text.rfind(b'"')
        end = text.rfind(b",", quote + 1) + 1
        if end:
            outside[-1] = outside[-1][: end - len(text)] if end < len(text) else outside[-1]
        elif quote > 0:
            ends_in_string, end = True, quote
            outside.pop()
    if end <= 0:
        return 0, place, len(place.stack)
    stack, least = _follow(place.stack, b"".join(outside))
    last = b"".join(outside).rstrip(_SPACE)[-1:] or place.last
    return end, Place(stack, ends_in_string, last), least


def windows(text: Pieces) -> Turns[list[Window]]:
    """Check a text, and divide it.

    Raises:
        InvalidJsonError: it is not valid JSON, or has a number or a run of white space beyond `MOST_UNCUT_BYTES`.
    """
    found: list[Window] = []
    start, stop, size, place = 0, 0, len(text), Place()
    while start < size:
        stop = min(stop + WINDOW_BYTES, size)
        part = text.read(start, stop)
        if stop == size:
            _check(place, part, b"", start)
            _, least = _follow(place.stack, b"".join(_split_at_quotes(part)[place.in_string :: 2]))
            found.append(Window(start, stop, place, least, plain=False))
            return found
        end, after, least = cut(part, place)
        if end:
            _check(place, part[:end], after.closed() if after.stack else b"", start)
            plain = place.in_string and after.in_string and b'"' not in part[:end]
            found.append(Window(start, start + end, place, least, plain))
            start, place = start + end, after
        elif len(part) > MOST_UNCUT_BYTES:
            raise InvalidJsonError(f"a number or white space of more than {MOST_UNCUT_BYTES} bytes after byte {start}")
        yield
    raise InvalidJsonError("there is nothing")


def _check(place: Place, part: bytes, closed: bytes, start: int) -> None:
    if start and not place.stack:
        if part.strip(_SPACE):
            raise InvalidJsonError(f"trailing characters after byte {start}")
        return
    try:
        _any.decode(place.opened() + part + closed)
    except (msgspec.MsgspecError, RecursionError) as error:
        what = _BYTE.sub("", str(error))
        raise InvalidJsonError(f"{what} (after byte {start})") from None


def _split_at_quotes(text: bytes) -> list[bytes]:
    """The text without escaped quotes, split at the others; backslashes go in pairs, from the left."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return text.split(b'"')


def _end_of_whole_escapes(text: bytes) -> int:
    """Length of a text within a string, without an escape or half of a surrogate pair that goes on behind it."""
    at = max(0, len(text) - _TAIL_BYTES)
    before = text[:at]
    at -= (at - len(before.rstrip(b"\\"))) % 2  # to the backslash of an escape that `at` lies in
    whole = _WHOLE_ESCAPES.match(text, at)
    assert whole is not None
    return whole.end()


def _follow(stack: bytes, outside: bytes) -> tuple[bytes, int]:
    """What is open after this text without its strings, and the least that was on the way."""
    brackets = outside.translate(None, _NOT_BRACKETS)
    for _ in range(_CANCELLING):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    opened, least = stack, len(stack)
    for opening, closing in _RUNS.findall(brackets):
        opened += opening
        kept = len(opened) - len(closing)
        if kept < 0 or opened[kept:].translate(_CLOSING)[::-1] != closing:
            raise InvalidJsonError(f"{closing[:1].decode()!r} closes what is not open")
        opened = opened[:kept]
        least = min(least, kept)
    if len(opened) > MOST_DEPTH:
        raise InvalidJsonError(f"it is nested deeper than {MOST_DEPTH}")
    return opened, least
