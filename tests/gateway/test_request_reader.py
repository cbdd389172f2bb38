"""A head that was read before is looked up; what is read of a request does not depend on those before it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.edge import request as module
from coterie.gateway.edge.http1 import RefusedError
from coterie.gateway.edge.request import Request, RequestReader


def head(*lines: str, first: str = "POST /v1/completions?a=b HTTP/1.1") -> str:
    return "".join(f"{line}\r\n" for line in (first, "Host: x", *lines)) + "\r\n"


SIZED = "Content-Length: %d"
HEADS = {
    "sized": head(SIZED),
    "sized first": head("content-length: %d", "X-A: 1", "x-a: 2", "AUTHORIZATION: Bearer k "),
    "sized by a wide line": head("Content-Length:  %d"),
    "sized by a name that only ends so": head("X-Content-Length: %d"),
    "sized twice": head(SIZED, SIZED),
    "sized and folded": head(SIZED, " 1"),
    "folded into the size": head("A: 1", SIZED, "\t2"),
    "sized and chunked": head(SIZED, "Transfer-Encoding: chunked"),
    "sized with a zero": head("Content-Length: 0%d"),
    "not sized": head(),
    "expected": head("Expect: 100-continue", SIZED),
    "closing": head("Connection: close", SIZED),
    "naming a header": head("Connection: x-a", "X-A: 1", SIZED),
    "upgraded": head("Connection: upgrade", "Upgrade: h2c", SIZED),
    "old": head(SIZED, first="POST / HTTP/1.0"),
    "old and kept": head(SIZED, "Connection: keep-alive", first="POST / HTTP/1.0"),
    "absolute": head(SIZED, first="GET http://x/health HTTP/1.1"),
    "behind an empty line": "\r\n" + head(SIZED),
    "without host": "POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n",
    "long": head("X-Long: " + 3000 * "l", SIZED),
}
ALIKE = st.sampled_from(["sized", "sized first", "naming a header", "absolute"])
BODIES = (b"", b"x", b'{"a": 1}', b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n\r\n", bytes(3000))


def sent(name: str, body: bytes) -> bytes:
    text = HEADS[name]
    return text.replace("%d", str(len(body))).encode() + body


class Notes:
    """Notes what is taken."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def on_begin(self) -> None:
        self.taken.append("begun")

    def on_head(self, request: Request, body_bytes: int) -> None:
        self.taken.append(("head", *fields(request), body_bytes))

    def on_more(self, count: int, size: int) -> None:
        self.taken.append((count, size))

    def on_request(self, request: Request) -> None:
        self.taken.append(("whole", *fields(request), request.body, request.keep_alive))


def fields(request: Request) -> tuple[Any, ...]:
    named = request.header(b"x-a"), request.header(b"expect")
    headers = tuple(header for header in request.headers if header[0] != b"content-length")
    return request.method, request.target, request.path, headers, request.http10, named


def read(reader: RequestReader, notes: Notes, data: bytes) -> list[Any]:
    notes.taken = []
    try:
        reader.feed(data)
    except RefusedError as error:
        notes.taken.append(("refused", error.status))
        reader.reset()
    return [*notes.taken, reader.partial]


def read_anew(data: bytes) -> list[Any]:
    module._remembered.clear()
    notes = Notes()
    return read(RequestReader(notes), notes, data)


@pytest.mark.parametrize("name", HEADS)
@given(st.lists(st.sampled_from(BODIES), min_size=2, max_size=4))
def test_a_request_is_read_alike_whatever_came_before_it_on_other_connections(name: str, bodies: list[bytes]) -> None:
    expected = [read_anew(sent(name, body)) for body in bodies]
    module._remembered.clear()
    notes = [Notes() for _ in bodies]
    found = [read(RequestReader(note), note, sent(name, body)) for note, body in zip(notes, bodies, strict=True)]
    assert found == expected


@given(st.lists(st.tuples(ALIKE, st.sampled_from(BODIES))))
def test_a_request_is_read_alike_whatever_came_before_it_on_its_connection(sendings: list[tuple[str, bytes]]) -> None:
    expected = [read_anew(sent(*sending)) for sending in sendings]
    module._remembered.clear()
    notes = Notes()
    reader = RequestReader(notes)
    assert [read(reader, notes, sent(*sending)) for sending in sendings] == expected


def test_requests_with_one_head_share_what_is_made_of_it_and_no_more() -> None:
    module._remembered.clear()
    kept: list[Request] = []
    notes = Notes()
    notes.on_request = kept.append  # type: ignore[method-assign]
    for body in (b"a", b"bc", b"d"):
        read(RequestReader(notes), notes, sent("sized", body))
    first, second, third = kept
    assert [request.body for request in kept] == [b"a", b"bc", b"d"]
    second.keep_alive = False
    assert third.keep_alive
    assert first.lines is second.lines is third.lines


def test_heads_without_end_are_not_remembered_without_end() -> None:
    module._remembered.clear()
    for number in range(3 * module._MOST_REMEMBERED):
        notes = Notes()
        read(RequestReader(notes), notes, head(SIZED % 1, f"x-request-id: {number}").encode() + b"x")
        assert 0 < len(module._remembered) <= module._MOST_REMEMBERED
