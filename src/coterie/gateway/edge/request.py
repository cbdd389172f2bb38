"""A client's request, and how it is read off a connection."""

from __future__ import annotations

import re
from typing import Any, Protocol

import httptools
import msgspec

from coterie.engines.base import Body
from coterie.engines.large import LARGE_BYTES
from coterie.engines.pieces import Pieces
from coterie.gateway.edge.http1 import MAX_HEAD_BYTES, Header, RefusedError, origin_form
from coterie.gateway.edge.keys import Key

MAX_HEADERS = 200
_KEPT_BYTES = 64 << 10
_KNOWN_HEAD_BYTES = 2 << 10
_LENGTH = re.compile(rb"\r\ncontent-length: ([1-9][0-9]{0,8})\r\n", re.IGNORECASE)


class Request(msgspec.Struct, eq=False):
    """A client's request; header names in lower case.

    Attributes:
        method: such as "POST".
        target: path and query, as sent.
        path: the target without its query.
        headers: all headers, in order.
        body: the whole body, without framing; in pieces if it is large.
        keep_alive: whether the client expects another request on the connection.
        http10: whether the client speaks HTTP/1.0, which has no chunks.
        arrived_s: when it was complete, on the loop's clock.
        key: the API key that it shows; None where none is asked for.
        lines: what workers are sent of its headers, with the client's key and without, once made; requests with the
            same head share it.
    """

    method: str = ""
    target: bytes = b""
    path: str = ""
    headers: list[Header] = msgspec.field(default_factory=list)
    body: Body = b""
    keep_alive: bool = True
    http10: bool = False
    arrived_s: float = 0.0
    key: Key | None = None
    lines: dict[bool, bytes] = msgspec.field(default_factory=dict)
    _named: dict[bytes, bytes] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Value of the first header called `name`, which is in lower case; only once all headers are there."""
        if self._named is None:
            self._named = dict(reversed(self.headers))  # so that the first of several counts
        return self._named.get(name)

    def again(self, body: bytes) -> Request:
        """A request with the same head but for the length of its body; it shares what is made of the head."""
        return Request(self.method, self.target, self.path, self.headers, body, lines=self.lines, _named=self._named)


class Taker(Protocol):
    """Takes what is read; its methods may refuse the request, by `RefusedError`."""

    def on_begin(self) -> None:
        """A request begins to come."""
        ...

    def on_head(self, request: Request, body_bytes: int) -> None:
        """A request's head is complete, and announces so many bytes of body; 0 where it does not say how many."""
        ...

    def on_more(self, count: int, size: int) -> None:
        """So many more bytes of its body have come, which make so many in all."""
        ...

    def on_request(self, request: Request) -> None:
        """It is complete."""
        ...


class RequestReader:
    """Reads requests off one connection, one after another.

    Most of a client's differ in their bodies alone: a head that comes again is looked up.  The reader keeps the last
    one only, so that nobody's heads take others' room, and keys in them go with their connection.

    Attributes:
        partial: whether a part of a request has come.
    """

    __slots__ = (
        "_body", "_body_size", "_head_size", "_in_head", "_known", "_known_head", "_next", "_parser", "_piece",
        "_piece_size", "_taker", "partial",
    )  # fmt: skip

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._parser: Any = httptools.HttpRequestParser(self)
        self._known_head = b""
        self._known: Request | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what has come of a request."""
        self._next = Request()
        self.partial = False
        self._body: list[bytes] = []
        self._body_size = 0
        self._piece: list[bytes] = []
        self._piece_size = 0
        self._head_size = 0
        self._in_head = True

    def feed(self, data: bytes | memoryview) -> None:
        """Read on.

        Raises:
            RefusedError: what comes is no request that is taken; nothing more can be read.
        """
        whole = _whole(data) if isinstance(data, bytes) and not self.partial else None
        if whole is not None and self._known is not None and whole[0] == self._known_head:
            self._take(self._known.again(whole[1]))
            return
        before, body_size, rest = self._next, self._body_size, memoryview(data)
        while rest:
            rest = self._parse(rest)
        if whole is not None:
            self._remember(before, *whole)
        if self._next is before:
            # Neither a head, nor a chunk's extension, nor a trailer may be endless.  What began within a read
            # counts from the next read on.
            self._head_size = 0 if self._body_size > body_size else self._head_size + len(data)
            _check_head_size(self._head_size)

    def _remember(self, request: Request, head: bytes, body: bytes) -> None:
        """Keep what was read of a head that came twice, unless more than the body's length depends on what followed.

        Kept are requests that the parser took to be what `_whole` took them for, and after which it reads on as if it
        had not seen them.
        """
        if head != self._known_head:
            self._known_head, self._known = head, None
            return
        if request.body != body or not request.keep_alive or request.header(b"content-length") != b"%d" % len(body):
            return
        headers = [header for header in request.headers if header[0] != b"content-length"]
        named = dict(reversed(headers))
        self._known = Request(request.method, request.target, request.path, headers, lines=request.lines, _named=named)

    def _take(self, request: Request) -> None:
        """Take a request of which the parser would find what it found of an earlier one."""
        self._head_size, size = 0, len(request.body)
        self._taker.on_begin()
        self._taker.on_head(request, size)
        self._taker.on_more(size, size)
        self._taker.on_request(request)

    def _parse(self, data: memoryview) -> memoryview:
        """Parse `data`; return what is left of it after a head that offers to upgrade."""
        try:
            self._parser.feed_data(data)
            return data[:0]
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise RefusedError(400, f"not an HTTP/1.1 request: {error}") from None
        self._decline_upgrade()  # not where the upgrade is handled: it would become the context of what this raises
        return rest

    def _decline_upgrade(self) -> None:
        """Read the head again as if it had not offered another protocol, as RFC 9110, section 7.8, lets a server.

        Some clients offer HTTP/2 with every request; the parser takes what follows for the other protocol.
        """
        request = self._next
        if request.method == "CONNECT":
            raise RefusedError(405, "CONNECT is not served")
        version = b"1.0" if request.http10 else b"1.1"
        lines = [b"%b %b HTTP/%b" % (request.method.encode(), request.target, version)]
        lines += [b"%b: %b" % header for header in request.headers if header[0] != b"upgrade"]
        self.reset()
        self._parser = httptools.HttpRequestParser(self)
        self._parse(memoryview(b"\r\n".join([*lines, b"", b""])))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self.partial = True
        self._taker.on_begin()

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._next.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, for trailers too: they are dropped, as RFC 9110, section 6.5.1, asks for."""
        if self._in_head:
            self._next.headers.append((name.lower(), value.rstrip(b" \t")))  # of what is before it, the parser did

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        request = self._next
        request.method = self._parser.get_method().decode("ascii")
        if not request.target.startswith(b"/"):
            request.target = origin_form(request.target)
        request.path = request.target.partition(b"?")[0].decode("latin-1")
        request.http10 = self._check_version()
        if self._parser.should_upgrade():
            return
        self._in_head = False
        _check_head(request)
        self._taker.on_head(request, int(request.header(b"content-length") or 0))

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body_size += len(data)
        self._taker.on_more(len(data), self._body_size)
        self._piece.append(data)
        self._piece_size += len(data)
        if self._piece_size >= _KEPT_BYTES:  # chunks of a byte each are not to take a hundred times their size
            self._end_piece()

    def _end_piece(self) -> None:
        self._body.append(b"".join(self._piece))
        self._piece.clear()
        self._piece_size = 0

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._parser.should_upgrade():
            return
        request = self._next
        self._end_piece()
        request.body = b"".join(self._body) if self._body_size <= LARGE_BYTES else Pieces(self._body)
        request.keep_alive = self._parser.should_keep_alive() and not request.http10
        self.reset()
        self._taker.on_request(request)

    def _check_version(self) -> bool:
        """Whether the client speaks HTTP/1.0; the parser would take 0.9 and 2.0, too."""
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise RefusedError(400, f"HTTP/{version} is not served; use HTTP/1.1")
        return bool(version == "1.0")


def _whole(data: bytes) -> tuple[bytes, bytes] | None:
    """Head and body, if these are all bytes of one request; the head is without the digits of the body's length."""
    end = data.find(b"\r\n\r\n", 0, _KNOWN_HEAD_BYTES) + 4
    length = _LENGTH.search(data, 0, end)
    if length is None or end + int(length[1]) != len(data) or len(data) > LARGE_BYTES:
        return None
    start, stop = length.span(1)
    return data[:start] + data[stop:end], data[end:]


def _check_head(request: Request) -> None:
    headers = request.headers
    if len(headers) > MAX_HEADERS:
        raise RefusedError(431, f"there are more than {MAX_HEADERS} headers")
    _check_head_size(sum([len(name) + len(value) + 4 for name, value in headers]))
    hosts = [name for name, _ in headers].count(b"host")
    if hosts > 1 or not (hosts or request.http10):  # RFC 9112, section 3.2
        raise RefusedError(400, f"there must be one Host header, and there are {hosts}")
    coding = request.header(b"transfer-encoding")
    if coding is not None and request.http10:  # RFC 9112, section 6.1
        raise RefusedError(400, "HTTP/1.0 has no transfer-encoding; send a content-length")
    if coding is not None and coding.lower() != b"chunked":
        raise RefusedError(501, "this transfer-encoding is not served; send chunked alone")


def _check_head_size(size: int) -> None:
    if size > MAX_HEAD_BYTES:
        raise RefusedError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")
