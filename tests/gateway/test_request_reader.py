"""A head that came before on its connection is looked up; requests are read as if it had not come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    notes = Notes()
    return read(RequestReader(notes), notes, data)


@pytest.mark.parametrize("name", HEADS)
@given(st.lists(st.sampled_from(BODIES), min_size=3, max_size=5))
def test_a_request_is_read_alike_however_often_its_head_came_before(name: str, bodies: list[bytes]) -> None:
    notes = Notes()
    reader = RequestReader(notes)
    for body in bodies:
        found = read(reader, notes, sent(name, body))
        assert found == read_anew(sent(name, body))
        whole = [note for note in found[:-1] if note[0] == "whole"]
        if len(whole) != 1 or whole[0][-2:] != (body, True):
            break  # the connection ends here, or what is sent next is read together with a part of this


@given(st.lists(st.tuples(ALIKE, st.sampled_from(BODIES))))
def test_a_request_is_read_alike_whatever_came_before_it(sendings: list[tuple[str, bytes]]) -> None:
    expected = [read_anew(sent(*sending)) for sending in sendings]
    notes = Notes()
    reader = RequestReader(notes)
    assert [read(reader, notes, sent(*sending)) for sending in sendings] == expected


def test_requests_with_one_head_share_what_is_made_of_it_and_no_more() -> None:
    kept: list[Request] = []
    notes = Notes()
    notes.on_request = kept.append  # type: ignore[method-assign]
    reader = RequestReader(notes)
    for body in (b"a", b"bc", b"d", b"e"):
        read(reader, notes, sent("sized", body))
    _, second, third, fourth = kept
    assert [request.body for request in kept] == [b"a", b"bc", b"d", b"e"]
    third.keep_alive = False
    assert fourth.keep_alive
    assert second.lines is third.lines is fourth.lines


def test_a_reader_keeps_no_head_but_the_last() -> None:
    notes = Notes()
    reader = RequestReader(notes)
    for _ in range(2):
        read(reader, notes, head(SIZED % 1, "Authorization: Bearer secret").encode() + b"x")
    assert b"secret" in reader._known_head
    read(reader, notes, sent("sized", b"x"))
    assert b"secret" not in reader._known_head
    assert reader._known is None
