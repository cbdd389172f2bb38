"""Heads and framings, against hypothesis's idea of how bytes may be cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.edge.http1 import (
    HOP_BY_HOP,
    ChunkedFraming,
    LengthFraming,
    MalformedError,
    end_to_end,
    error_body,
    framing_of,
    parse_response_head,
    response_head,
)

parts = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
cuts = st.lists(st.integers(0, 400), max_size=12)


def encode(chunks: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    return body + b"0\r\n" + trailer + b"\r\n"


def pieces(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut for cut in at if cut < len(data))})
    return [data[start:end] for start, end in pairwise(edges)]


@given(parts, cuts, st.sampled_from([b"", b";a=b", b" ;x"]), st.sampled_from([b"", b"x: y\r\n"]), st.binary(max_size=9))
def test_chunks_cut_anywhere_give_the_same_payload_and_the_exact_end(
    chunks: list[bytes], at: list[int], extension: bytes, trailer: bytes, behind: bytes
) -> None:
    body = encode(chunks, extension, trailer)
    payload: list[bytes] = []
    framing = ChunkedFraming(payload)
    used = 0
    for piece in pieces(body + behind, at):
        if framing.done:
            break
        used += framing.feed(piece)
    assert framing.done
    assert used == len(body)
    assert b"".join(payload) == b"".join(chunks)


@given(parts, cuts)
def test_a_chunk_can_be_inserted_exactly_between_chunks(chunks: list[bytes], at: list[int]) -> None:
    boundaries, size = {0}, 0
    for chunk in chunks:
        size += len(encode([chunk])) - len(encode([]))
        boundaries.add(size)
    framing, position = ChunkedFraming(), 0
    for piece in pieces(encode(chunks)[:size], at):
        position += framing.feed(piece)
        assert framing.between_chunks == (position in boundaries)


@pytest.mark.parametrize(
    "bad", [b"x\r\n", b"-1\r\n", b"0x5\r\n", b"1_0\r\n", b"\r\n", b"5\n", b"3\r\nabcdef\r\n", b"f" * 5000]
)
def test_what_is_not_chunked_is_refused(bad: bytes) -> None:
    with pytest.raises(MalformedError):
        ChunkedFraming().feed(bad)


@given(st.integers(0, 50), st.binary(max_size=60))
def test_a_length_takes_its_bytes_and_no_more(length: int, data: bytes) -> None:
    framing = LengthFraming(length)
    assert framing.feed(data) == min(length, len(data))
    assert framing.done == (len(data) >= length)


def test_a_response_head_is_read_with_its_framing() -> None:
    head = parse_response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nX-A: b\r\n\r\n")
    assert (head.status, head.length, head.chunked, head.keep_alive) == (200, 12, False, True)
    assert head.header(b"x-a") == b"b"
    assert head.header(b"none") == b""
    assert parse_response_head(b"HTTP/1.1 204 No\r\n\r\n").length == 0
    assert parse_response_head(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").keep_alive
    assert not parse_response_head(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\n").keep_alive
    assert not parse_response_head(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: x, Close\r\n\r\n").keep_alive
    assert not parse_response_head(b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\n").keep_alive
    endless = parse_response_head(b"HTTP/1.1 200 OK\r\n\r\n")
    assert (endless.length, endless.keep_alive) == (None, False)
    assert framing_of(endless).ends_with_connection
    assert isinstance(
        framing_of(parse_response_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n")), ChunkedFraming
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"not http\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    ],
)
def test_what_is_not_a_response_head_is_refused(bad: bytes) -> None:
    with pytest.raises(MalformedError):
        parse_response_head(bad)


def test_only_end_to_end_headers_pass() -> None:
    headers = [(b"a", b"1"), (b"connection", b"close, X-B"), (b"x-b", b"2"), (b"te", b"x"), (b"c", b"3"), (b"d", b"4")]
    assert end_to_end(headers, HOP_BY_HOP | {b"d"}) == [(b"a", b"1"), (b"c", b"3")]


def test_a_response_head_and_an_error_are_written_as_agreed() -> None:
    assert response_head(404, [(b"a", b"b")]) == b"HTTP/1.1 404 Not Found\r\na: b\r\n\r\n"
    assert error_body("m", "t", param="p") == b'{"error":{"message":"m","type":"t","param":"p","code":null}}'


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_a_status_without_body_has_none_whatever_its_headers_say(status: bytes) -> None:
    head = parse_response_head(b"HTTP/1.1 %b\r\ntransfer-encoding: chunked\r\n\r\n" % status)
    assert (head.chunked, head.length) == (False, 0)
    assert framing_of(head).done


def test_a_chunk_of_a_size_that_was_read_before_is_taken_apart_alike_and_checked_alike():
    for _ in range(2):  # the second time the line is known
        payload = []
        framing = ChunkedFraming(payload)
        assert framing.feed(b"3\r\nabc\r\n") == 8
        assert framing.between_chunks
        assert framing.feed(b"3\r\nde") == 5
        assert framing.feed(b"f\r\n3\r\nghi\r\n") == 11
        assert framing.feed(b"0\r\n\r\nmore") == 5
        assert framing.done
        assert b"".join(payload) == b"abcdefghi"
        assert framing.feed(b"3\r\nabc\r\n") == 0
    with pytest.raises(MalformedError):
        ChunkedFraming().feed(b"3\r\nabcde")
    assert ChunkedFraming().feed(b"3\r\nabc\r\n0\r\n\r\n") == 13
