"""HTTP/1.1 as both sides of the gateway speak it: heads as values, body framings, errors in OpenAI's shape."""

from __future__ import annotations

import http
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import httptools
import msgspec

from coterie.errors import CoterieError

Header = tuple[bytes, bytes]

MAX_HEAD_BYTES = 64 << 10
MAX_CHUNK_LINE_BYTES = 4 << 10
_REMEMBERED_HEAD_BYTES = 1 << 10

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern one connection only (RFC 9110, section 7.6.1)."""

_NOT_FROM_WORKERS = HOP_BY_HOP | {b"x-request-id"}
_PHRASES = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_ABSOLUTE = re.compile(rb"https?://[^/?#]+(.*)", re.IGNORECASE | re.DOTALL)
_SHORT_LINE_BYTES = 8
_MOST_SIZES = 4096
_sizes: dict[bytes, int] = {}
"""Sizes of chunks, by short lines that said so."""
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?\r\n", re.DOTALL)


class MalformedError(Exception):
    """Bytes that are not HTTP/1.1."""


class RefusedError(CoterieError):
    """A request that the gateway does not take.

    Attributes:
        status: HTTP status.
        kind: the error's `type` in OpenAI's shape.
        code: its `code`.
        headers: to be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        headers: Sequence[Header] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.headers = headers

    @property
    def reason(self) -> str:
        """The error in a word, as metrics count it."""
        return self.code or str(self.status)


def origin_form(target: bytes) -> bytes:
    """A request's target without scheme and host, where it has them (RFC 9112, section 3.2.2)."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        return target
    return absolute[1] if absolute[1].startswith(b"/") else b"/" + absolute[1]


def end_to_end(headers: Iterable[Header], drop: frozenset[bytes]) -> list[Header]:
    """The headers that a proxy passes on: neither in `drop` nor named in Connection.

    Args:
        headers: their names in lower case.
        drop: `HOP_BY_HOP` and what else is not to pass.
    """
    for name, value in headers:
        if name == b"connection":
            drop = drop | {token.strip().lower() for token in value.split(b",")}
    return [header for header in headers if header[0] not in drop]


def response_head(status: int, headers: Iterable[Header], lines: bytes = b"") -> bytes:
    """Bytes of a response's head.

    Args:
        status: HTTP status.
        headers: headers.
        lines: complete header lines that go before them.
    """
    written = b"".join([b"%b: %b\r\n" % header for header in headers])
    return b"HTTP/1.1 %d %b\r\n%b%b\r\n" % (status, _PHRASES.get(status, b"Status"), lines, written)


def retry_after(seconds: float) -> Header:
    """The header that says when to ask again, in whole seconds and at least one."""
    return b"retry-after", b"%d" % max(1, math.ceil(seconds))


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """An error in the shape of OpenAI's API."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


# --- responses from workers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The head of a worker's response; header names in lower case.

    Attributes:
        status: HTTP status.
        headers: all headers, in order.
        chunked: whether the body comes in chunks.
        length: bytes of the body; None if chunked or ended by the connection's end.
        keep_alive: whether the connection can carry another request afterwards.
        lines: the header lines that a client is to see, without the worker's `x-request-id`.
    """

    status: int
    headers: tuple[Header, ...]
    chunked: bool
    length: int | None
    keep_alive: bool
    lines: bytes = b""

    def header(self, name: bytes) -> bytes:
        """Value of the first header called `name`, which is in lower case; empty if there is none."""
        return next((value for key, value in self.headers if key == name), b"")


class _HeadCollector:
    __slots__ = ("headers",)

    def __init__(self) -> None:
        self.headers: list[Header] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def parse_response_head(head: bytes) -> ResponseHead:
    """Read a complete response head.

    Workers send few different heads, a second's often all alike: short ones that were read before are looked up.

    Raises:
        MalformedError: it is not one.
    """
    return _remembered_head(head) if len(head) <= _REMEMBERED_HEAD_BYTES else _read_head(head)


def _read_head(head: bytes) -> ResponseHead:
    collector = _HeadCollector()
    parser: Any = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise MalformedError(f"not an HTTP response: {error}") from None
    named = dict(collector.headers)
    status = parser.get_status_code()
    if len(collector.headers) > len(named) and [name for name, _ in collector.headers].count(b"transfer-encoding") > 1:
        raise MalformedError("transfer-encoding is there twice")
    coding = named.get(b"transfer-encoding", b"").strip().lower()
    if coding not in (b"", b"chunked"):
        raise MalformedError("its transfer-encoding is not understood")
    empty = status < 200 or status in (204, 304)
    chunked = coding == b"chunked" and not empty
    length = 0 if empty else int(named[b"content-length"]) if b"content-length" in named and not chunked else None
    # Not by the parser: behind a body that is empty it has forgotten the head.
    kept = parser.get_http_version() == "1.1" and not _closes(collector.headers)
    keep_alive = kept and (chunked or length is not None)
    lines = b"".join([b"%b: %b\r\n" % header for header in end_to_end(collector.headers, _NOT_FROM_WORKERS)])
    return ResponseHead(status, tuple(collector.headers), chunked, length, keep_alive, lines)


def _closes(headers: Iterable[Header]) -> bool:
    return any(name == b"connection" and b"close" in value.lower() for name, value in headers)


_remembered_head = lru_cache(maxsize=1024)(_read_head)


# --- body framings -----------------------------------------------------------------------------------


class Framing(Protocol):
    """Watches a body go by, to know where it ends.

    Attributes:
        done: whether the body is complete.
        between_chunks: whether a chunk could be inserted here.
        ends_with_connection: whether the connection's end is the body's end.
    """

    ends_with_connection: ClassVar[bool]
    done: bool
    between_chunks: bool

    def feed(self, data: bytes) -> int:
        """Look at the next bytes; return how many of them belong to the body.

        Raises:
            MalformedError: the bytes do not follow the framing.
        """
        ...


class LengthFraming:
    """A body of known length."""

    ends_with_connection: ClassVar[bool] = False
    __slots__ = ("_left", "between_chunks", "done")

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0
        self.between_chunks = False

    def feed(self, data: bytes) -> int:
        """See `Framing.feed`."""
        used = min(self._left, len(data))
        self._left -= used
        self.done = self._left == 0
        return used


class CloseFraming:
    """A body that ends with its connection."""

    ends_with_connection: ClassVar[bool] = True
    __slots__ = ("between_chunks", "done")

    def __init__(self) -> None:
        self.done = False
        self.between_chunks = False

    def feed(self, data: bytes) -> int:
        """See `Framing.feed`."""
        return len(data)


class ChunkedFraming:
    r"""Chunked transfer coding (RFC 9112, section 7.1).

        size[;extension]\r\n data\r\n  size\r\n data\r\n  0\r\n [trailer\r\n]* \r\n
       ^                             ^
       between_chunks: the next byte opens a chunk

    Attributes:
        payload: if given, the chunks' data is appended to it.
    """

    ends_with_connection: ClassVar[bool] = False
    __slots__ = ("_left", "_line", "_trailer", "between_chunks", "done", "payload")

    def __init__(self, payload: list[bytes] | None = None) -> None:
        self.payload = payload
        self.done = False
        self.between_chunks = True
        self._left = 0  # bytes of the current chunk still to come, its \r\n included
        self._line = b""  # beginning of a size or trailer line
        self._trailer = False

    def feed(self, data: bytes) -> int:
        """See `Framing.feed`."""
        at, end = 0, len(data)
        if self.between_chunks:  # most reads bring one chunk, whole, of a size that was read before
            start = data.find(b"\n", 0, _SHORT_LINE_BYTES) + 1
            if _sizes.get(data[:start]) == end - start - 2 and data.endswith(b"\r\n"):
                if self.payload is not None:
                    self.payload.append(data[start:-2])
                return end
        while at < end and not self.done:
            at = self._skip_chunk(data, at, end) if self._left else self._read_line(data, at)
        self.between_chunks = not (self._left or self._line or self._trailer)
        return at

    def _skip_chunk(self, data: bytes, at: int, end: int) -> int:
        stop = min(at + self._left, end)
        self._left -= stop - at
        if self.payload is not None:
            # _left counts the \r\n that closes the chunk: what of it lies before `stop` is not payload.
            self.payload.append(data[at : max(at, stop - max(0, 2 - self._left))])
        if not self._left and data[stop - 1] != 0x0A:
            raise MalformedError("a chunk is longer than its size")
        return stop

    def _read_line(self, data: bytes, at: int) -> int:
        found = data.find(b"\n", at) + 1
        self._line += data[at : found or len(data)]
        if len(self._line) > MAX_CHUNK_LINE_BYTES:
            raise MalformedError("a chunk's size line is too long")
        if not found:
            return len(data)
        line, self._line = self._line, b""
        if self._trailer:
            self.done = line == b"\r\n"
        else:
            self._open_chunk(line)
        return found

    def _open_chunk(self, line: bytes) -> None:
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise MalformedError("a chunk has no size")
        length = int(size[1], 16)
        if length and len(line) <= _SHORT_LINE_BYTES and len(_sizes) < _MOST_SIZES:
            _sizes[line] = length
        self._left = length + 2 if length else 0
        self._trailer = length == 0


def framing_of(head: ResponseHead) -> Framing:
    """The framing that a response's head announces."""
    if head.chunked:
        return ChunkedFraming()
    return CloseFraming() if head.length is None else LengthFraming(head.length)
