"""Bodies too large to be read at once: cut down to what the gateway reads of them, and completed when sent on.

A long string or list becomes a short one that begins alike and has a mark in it; objects are looked into, so that no
name in them is missed.  What is left is small, is read and rewritten as any other body, and where it is sent on, each
mark is replaced by the bytes it stands for, which were never joined, copied or decoded.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from coterie.engines.json_windows import InvalidJsonError, Place, Turns, Window, cut, windows
from coterie.engines.pieces import Piece, Pieces

LARGE_BYTES = 256 << 10
"""Bodies above it are cut down; smaller ones are parsed in well under a millisecond."""

MOST_LEFT_BYTES = 512 << 10
"""Most bytes that may be left: all but long strings and lists."""

MOST_MARKED = 256
MOST_MEMBERS = 4096
_LONG_BYTES = 128 << 10  # the counts of the largest models known take 83,288
_SHORTEST_BYTES = 4 << 10
_SHOWN_BYTES = 2 << 10
_DEEPEST_LOOK = 3
_TOKENS_A_TURN = 2048

_NONCE = secrets.token_hex(16).encode()  # no client can guess what is a mark
_MARK = re.compile(_NONCE + rb"[0-9a-f]{16}")
_numbers = count()

_NAME = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\r\n,\]}]++")
_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING_END = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[]\[{}]', re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Large:
    """What was cut out of a body.

    Attributes:
        cuts: by mark: what stands in the body, and what it stands for.
    """

    cuts: Mapping[bytes, tuple[bytes, Pieces]] = field(default_factory=dict)

    def __or__(self, other: Large) -> Large:
        """What was cut out of either of two bodies."""
        return Large({**self.cuts, **other.cuts}) if self.cuts and other.cuts else self if self.cuts else other

    def completed(self, body: bytes) -> bytes | Pieces:
        """A body made from what was cut down, with what was cut out put back."""
        if not self.cuts:
            return body
        parts: list[Piece] = []
        at = 0
        for mark in _MARK.finditer(body):
            short, whole = self.cuts[mark[0]]
            start = mark.start() - short.index(mark[0])
            assert body.startswith(short, start)  # engines pass values on as they are
            parts += (body[at:start], *whole.parts)
            at = start + len(short)
        return Pieces([*parts, body[at:]])


NOTHING_LARGE = Large()


def cut_down(body: Pieces) -> Turns[tuple[bytes, Large]]:
    """Check a JSON object, and cut it down.

    Raises:
        InvalidJsonError: it is not valid JSON or no object, or has too much beside long strings and lists.
    """
    text = _Text(body)
    start = text.after(_SPACE, 0)
    if text.byte(start) != b"{":
        raise InvalidJsonError("it is not an object")
    yield from text.divide()
    cutter = _Cutter(text)
    small = yield from cutter.of_object(start, 0)
    if len(small) > MOST_LEFT_BYTES:
        raise InvalidJsonError(f"more than {MOST_LEFT_BYTES} bytes are left of it without long strings and lists")
    return small, Large(cutter.cuts)


class _Text:
    """Finds its way in valid JSON: where values end, by the windows that it was divided into."""

    def __init__(self, body: Pieces) -> None:
        self.body = body
        self._windows: list[Window] = []
        self._starts: list[int] = []

    def divide(self) -> Turns[None]:
        """Check it."""
        self._windows = yield from windows(self.body)
        self._starts = [window.start for window in self._windows]

    def byte(self, at: int) -> bytes:
        """The byte at a position; empty at the end."""
        return self.body.read(at, at + 1)

    def after(self, pattern: re.Pattern[bytes], at: int) -> int:
        """Where a name, a scalar or white space ends."""
        size = 64
        while True:
            text = self.body.read(at, at + size)
            found = pattern.match(text)
            if found is not None and (found.end() < len(text) or len(text) < size):
                return at + found.end()
            if len(text) < size or size > LARGE_BYTES:
                raise InvalidJsonError(f"a name or white space of more than {LARGE_BYTES} bytes after byte {at}")
            size *= 4

    def members(self, at: int, depth: int) -> Turns[list[tuple[bytes, int, int]]]:
        """Name, start and stop of the value of each member of the object that opens at a position and depth."""
        found: list[tuple[bytes, int, int]] = []
        at = self.after(_SPACE, at + 1)
        while self.byte(at) != b"}":
            name_end = self.after(_NAME, at)
            start = self.after(_SPACE, self.after(_SPACE, name_end) + 1)  # over the colon
            stop = yield from self.end_of(start, depth + 1)
            found.append((self.body.read(at, name_end), start, stop))
            if len(found) > MOST_MEMBERS:
                raise InvalidJsonError(f"an object has more than {MOST_MEMBERS} fields")
            at = self.after(_SPACE, stop)
            if self.byte(at) == b",":
                at = self.after(_SPACE, at + 1)
            yield
        return found

    def end_of(self, at: int, depth: int) -> Turns[int]:
        """Where the value ends that begins at a position and depth."""
        first = self.byte(at)
        if first == b'"':
            return (yield from self._end_of_string(at))
        if first in (b"[", b"{"):
            return (yield from self._end_of_container(at, depth))
        return self.after(_SCALAR, at)

    def _end_of_string(self, at: int) -> Turns[int]:
        i = bisect_right(self._starts, at) - 1
        start = at + 1
        while True:
            window = self._windows[i]
            if not window.plain:
                end = _STRING_END.match(self.body.read(start, window.stop))
                assert end is not None
                if end[1]:
                    return start + end.end()
            yield
            start, i = window.stop, i + 1

    def _end_of_container(self, at: int, depth: int) -> Turns[int]:
        i = bisect_right(self._starts, at) - 1
        start, inside = at, Place(b"[" * depth)
        while True:
            window = self._windows[i]
            if window.least_depth <= depth:
                end = yield from self._closing(start, window.stop, inside, depth)
                if end is not None:
                    return end
            start, i = window.stop, i + 1
            inside = self._windows[i].place

    def _closing(self, start: int, stop: int, place: Place, depth: int) -> Turns[int | None]:
        """Where nesting comes back to a depth, between two positions of a window."""
        text, now = self.body.read(start, stop), len(place.stack)
        string = _STRING_END.match(text) if place.in_string else None
        for i, token in enumerate(_TOKEN.finditer(text, string.end() if string else 0)):
            if i % _TOKENS_A_TURN == _TOKENS_A_TURN - 1:
                yield
            kind = token[0][0]
            if kind in b"[{":
                now += 1
            elif kind in b"]}":
                now -= 1
                if now == depth:
                    return start + token.end()
        return None


class _Cutter:
    """Cuts values down.

    Attributes:
        cuts: see `Large`.
    """

    def __init__(self, text: _Text) -> None:
        self.cuts: dict[bytes, tuple[bytes, Pieces]] = {}
        self._text = text

    def of_object(self, at: int, depth: int) -> Turns[bytes]:
        """What is left of the object that opens at a position and depth."""
        members = yield from self._text.members(at, depth)
        most = _longest([stop - start for _, start, stop in members])
        left = []
        for name, start, stop in members:
            value = yield from self._of_value(start, stop, depth + 1, most)
            left.append(b"%b:%b" % (name, value))
        return b"{%b}" % b",".join(left)

    def _of_value(self, start: int, stop: int, depth: int, most: int) -> Turns[bytes]:
        text, first = self._text, self._text.byte(start)
        if stop - start <= most or first not in (b'"', b"[", b"{"):
            return text.body.read(start, stop)
        if first == b"{" and depth < _DEEPEST_LOOK:
            left = yield from self.of_object(start, depth)
            if len(left) <= most:
                return left
        several = first == b"[" and (yield from self._has_several(start, depth))
        return self._marked(start, stop, first, several=several)

    def _has_several(self, at: int, depth: int) -> Turns[bool]:
        """Whether a list of strings or lists has more than one."""
        text = self._text
        one = text.after(_SPACE, at + 1)
        if text.byte(one) not in (b'"', b"["):
            return False
        stop = yield from text.end_of(one, depth + 1)
        return text.byte(text.after(_SPACE, stop)) == b","

    def _marked(self, start: int, stop: int, first: bytes, *, several: bool) -> bytes:
        if len(self.cuts) >= MOST_MARKED:
            raise InvalidJsonError(f"more than {MOST_MARKED} of its strings and lists are long")
        mark = b"%b%016x" % (_NONCE, next(_numbers))
        short = b'"%b"' % mark if first == b"{" else self._beginning(start, mark)
        if several:
            short = short[:-1] + b',""]'
        self.cuts[mark] = (short, Pieces(self._text.body.span(start, stop)))
        return short

    def _beginning(self, start: int, mark: bytes) -> bytes:
        """How a string or a list begins, with a mark where it is cut off."""
        shown = self._text.body.read(start, start + _SHOWN_BYTES)
        end, place, _ = cut(shown, Place())
        if not end:  # in white space, a number, or brackets alone
            return b'["%b"]' % mark
        return shown[:end] + place.closed(mark)


def _longest(sizes: list[int]) -> int:
    """The longest value that is kept: less where there are many, so that all that is left is short."""
    most = _LONG_BYTES
    while most > _SHORTEST_BYTES and sum(min(size, most) for size in sizes) > MOST_LEFT_BYTES / 2:
        most //= 2
    return most
