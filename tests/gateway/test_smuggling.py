"""No bytes of a client make a request or a header at a worker that the gateway did not mean; nor a worker's, a reply.

Each attack goes through real sockets to a worker, with an innocent request right behind it.
"""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import Answer, Exchange, FakeEngine, serve_well
from stories import Cluster, cluster, story

ASK = b'{"model":"tiny","prompt":"a b c","max_tokens":3}'
SIZE = len(ASK)
START = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BEHIND = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def sized(headers: bytes = b"", *, start: bytes = START, size: bytes = b"%d" % SIZE) -> bytes:
    return start + headers + b"content-length: " + size + b"\r\n\r\n" + ASK


def chunked(
    coding: bytes = b"transfer-encoding: chunked\r\n",
    *,
    start: bytes = START,
    size: bytes = b"%x" % SIZE,
    line_end: bytes = b"\r\n",
    end: bytes = b"0\r\n\r\n",
) -> bytes:
    return start + coding + b"\r\n" + size + line_end + ASK + b"\r\n" + end


def started(old: bytes, new: bytes) -> bytes:
    assert old in START
    return START.replace(old, new)


REFUSED = {
    "both lengths": chunked(b"content-length: 5\r\ntransfer-encoding: chunked\r\n"),
    "both lengths, the other first": chunked(b"transfer-encoding: chunked\r\ncontent-length: 5\r\n"),
    "length twice": sized(b"content-length: %d\r\n" % SIZE),
    "two lengths": sized(b"content-length: 5\r\n"),
    "list of lengths": sized(size=b"%d, %d" % (SIZE, SIZE)),
    "signed length": sized(size=b"+%d" % SIZE),
    "negative length": sized(size=b"-1"),
    "hexadecimal length": sized(size=b"0x30"),
    "length with underscore": sized(size=b"4_8"),
    "length in two": sized(size=b"4 8"),
    "empty length": sized(size=b""),
    "length that overflows": sized(size=b"%d" % (2**64 + SIZE)),
    "coding of another name": chunked(b"transfer-encoding: xchunked\r\n"),
    "coding in quotes": chunked(b'transfer-encoding: "chunked"\r\n'),
    "coding after another": chunked(b"transfer-encoding: gzip, chunked\r\n"),
    "coding before another": chunked(b"transfer-encoding: chunked, identity\r\n"),
    "coding twice": chunked(b"transfer-encoding: chunked\r\n" * 2),
    "coding in a second header": chunked(b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n"),
    "no coding, but its header": sized(b"transfer-encoding:\r\n"),
    "identity and a length": sized(b"transfer-encoding: identity\r\n"),
    "coding behind a vertical tab": chunked(b"transfer-encoding: \x0bchunked\r\n"),
    "coding with space before the colon": chunked(b"transfer-encoding : chunked\r\n"),
    "coding with leading space": chunked(b" transfer-encoding: chunked\r\n"),
    "coding on a folded line": chunked(b"transfer-encoding:\r\n chunked\r\n"),
    "coding folded into another": sized(b"x: y\r\n transfer-encoding: chunked\r\n"),
    "coding behind a bare LF": chunked(b"x: y\ntransfer-encoding: chunked\r\n"),
    "coding behind a bare CR": chunked(b"x: y\rtransfer-encoding: chunked\r\n"),
    "coding with NUL": chunked(b"transfer-encoding\x00: chunked\r\n"),
    "coding in HTTP/1.0": chunked(start=started(b"1.1", b"1.0")),
    "space before the colon": sized(b"x : y\r\n"),
    "folded line": sized(b"x: y\r\n z\r\n"),
    "folded line with tab": sized(b"x: y\r\n\tz\r\n"),
    "bare LF": sized().replace(b"\r\n", b"\n"),
    "bare LF at the end of the head": sized().replace(b"\r\n\r\n", b"\n\n"),
    "bare CR in a value": sized(b"x: a\rb\r\n"),
    "NUL in a value": sized(b"x: a\x00b\r\n"),
    "NUL in a name": sized(b"x\x00y: a\r\n"),
    "control character in a value": sized(b"x: a\x01b\r\n"),
    "header without a name": sized(b": a\r\n"),
    "header without a colon": sized(b"abc\r\n"),
    "name that is no token": sized(b"x(y): a\r\n"),
    "chunk size that overflows": chunked(size=b"1%016x" % SIZE),
    "chunk size with prefix": chunked(size=b"0x%x" % SIZE),
    "chunk size with sign": chunked(size=b"+%x" % SIZE),
    "chunk size with space": chunked(size=b" %x" % SIZE),
    "chunk without size": chunked(size=b";x"),
    "chunk size line with bare LF": chunked(line_end=b"\n"),
    "chunk size line with bare CR": chunked(line_end=b"\r"),
    "extension with bare LF": chunked(size=b"%x;a\nb" % SIZE),
    "extension with bare CR": chunked(size=b"%x;a\rb" % SIZE),
    "extension with quoted CRLF": chunked(size=b'%x;a="\r\n0\r\n\r\n"' % SIZE),
    "chunk shorter than it says": chunked(size=b"%x" % (SIZE + 2)),
    "chunk longer than it says": chunked(size=b"%x" % (SIZE - 1)),
    "last chunk with bare LF": chunked(end=b"0\n\n"),
    "trailer that is a length": chunked(end=b"0\r\ncontent-length: 5\r\n\r\n"),
    "trailer with space before the colon": chunked(end=b"0\r\nx : y\r\n\r\n"),
    "two hosts": sized(b"host: y\r\n"),
    "no host": sized(start=started(b"host: x\r\n", b"")),
    "HTTP/0.9": sized(start=started(b" HTTP/1.1", b"")),
    "HTTP/2.0": sized(start=started(b"1.1", b"2.0")),
    "HTTP/2.0 with an offer to upgrade": sized(
        b"connection: upgrade\r\nupgrade: h2c\r\n", start=started(b"1.1", b"2.0")
    ),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version of two digits": sized(start=started(b"1.1", b"1.10")),
    "space in the target": sized(start=started(b"completions", b"completions?a b")),
    "tab in the target": sized(start=started(b"completions", b"completions?a\tb")),
    "NUL in the target": sized(start=started(b"completions", b"completions?\x00")),
    "CR in the target": sized(start=started(b"completions", b"completions?a\rb")),
    "target that is a host": sized(start=started(b"/v1/completions", b"x:80")),
    "space before the method": b" " + sized(),
    "both lengths with an offer to upgrade": chunked(
        b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n"
    ),
}
TAKEN = {
    "length with spaces around it": sized(size=b"  %d  " % SIZE),
    "coding in capitals": chunked(b"Transfer-Encoding: CHUNKED\r\n"),
    "coding behind a tab": chunked(b"transfer-encoding:\tchunked\r\n"),
    "header of a like name": sized(b"transfer_encoding: chunked\r\n"),
    "bytes beyond ASCII in a value": sized(b"x: a\xffb\r\n"),
    "chunk size with zeros before it": chunked(size=b"0" * 30 + b"%x" % SIZE),
    "chunk with an extension": chunked(size=b'%x;a="b;c"' % SIZE),
    "empty lines before the request": b"\r\n\r\n" + sized(),
    "absolute target": sized(start=started(b"/v1", b"http://elsewhere.example/v1")),
    "framing named in Connection": sized(b"connection: content-length, host, transfer-encoding\r\n"),
    "an offer to upgrade": chunked(b"connection: upgrade\r\nupgrade: websocket\r\ntransfer-encoding: chunked\r\n"),
    "a request in the body's whitespace": sized(size=b"%d" % (SIZE + 27)) + b"\r\n" * 13 + b" ",
}


async def statuses(running: Cluster, sent: bytes) -> list[int]:
    """Send bytes; the status of each reply until the gateway closes."""
    async with running.client() as client:
        client.send(sent)
        found = []
        while True:
            try:
                found.append((await client.reply()).status)
            except asyncio.IncompleteReadError as end:
                return found if not end.partial else [*found, 0]


def check_worker(engine: FakeEngine, requests: int) -> None:
    """See that a worker got so many requests, each as the gateway makes them, and not a byte besides."""
    assert len(engine.seen) == requests
    assert engine.aborted == 0
    for seen in engine.seen:
        assert (seen.method, seen.target) == ("POST", "/v1/completions")
        names = [line.partition(":")[0].lower() for line in seen.head.split("\r\n")[1:] if line]
        assert [names.count(name) for name in ("host", "content-length", "x-request-id")] == [1, 1, 1]
        assert "transfer-encoding" not in names
        assert seen.headers["host"] == f"127.0.0.1:{engine.port}"
        assert not any(character in line for line in seen.head.split("\r\n") for character in "\r\n\0")
        assert seen.json["prompt"] == "a b c"


@story
async def test_what_could_be_read_in_two_ways_is_refused_and_so_is_all_behind_it() -> None:
    async with cluster(decode=1, client_request_timeout_s=0.1) as running:
        found = {name: await statuses(running, sent + BEHIND) for name, sent in REFUSED.items()}
        for engine in running.engines:
            check_worker(engine, 0)
    assert {name for name, replies in found.items() if replies not in ([400], [501])} == set()


@story
async def test_a_chunk_that_never_ends_is_cut_off_in_time() -> None:
    async with cluster(decode=1, client_request_timeout_s=0.1) as running:
        assert await statuses(running, chunked(size=b"ffffffff") + BEHIND) in ([408], [413])
        for engine in running.engines:
            check_worker(engine, 0)


@story
async def test_what_can_be_read_in_one_way_only_is_one_request() -> None:
    async with cluster(decode=1) as running:
        for name, sent in TAKEN.items():
            running.forget_probes()
            assert await statuses(running, sent + BEHIND) == [200, 200], name
            for engine in running.engines:
                check_worker(engine, 1)


@story
async def test_a_request_within_a_body_stays_there() -> None:
    inner = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3, "user": sized().decode()}).encode()
    async with cluster(decode=1) as running:
        sent = START + b"content-length: %d\r\n\r\n" % len(inner) + inner
        assert await statuses(running, sent + BEHIND) == [200, 200]
        for engine in running.engines:
            check_worker(engine, 1)


@story
async def test_pipelined_requests_stay_apart() -> None:
    async with cluster(decode=1) as running:
        assert await statuses(running, (sized() + chunked()) * 5 + BEHIND) == [200] * 11
        for engine in running.engines:
            check_worker(engine, 10)


@story
async def test_what_is_behind_a_bad_request_is_not_read_even_if_a_reply_is_under_way() -> None:
    async with cluster(decode=1) as running:
        assert await statuses(running, sized() + REFUSED["both lengths"] + sized() + BEHIND) == [200, 400]
        for engine in running.engines:
            check_worker(engine, 1)


@story
async def test_headers_that_steer_the_gateway_are_not_made_by_trailers_or_by_the_workers_own_headers() -> None:
    async with cluster(decode=1) as running:
        sent = chunked(end=b"0\r\nx-request-id: forged\r\nauthorization: forged\r\n\r\n")
        assert await statuses(running, sent + BEHIND) == [200, 200]
        assert "forged" not in "".join(engine.seen[0].head for engine in running.engines)


# --- replies of workers ------------------------------------------------------------------------------

BODY = b'{"choices": []}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SPLIT = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond"
BAD_REPLIES = {
    "both lengths": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nf\r\n%b\r\n0\r\n\r\n" % BODY,
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "coding of another name": HEAD + b"transfer-encoding: xchunked\r\n\r\nf\r\n%b\r\n0\r\n\r\n" % BODY,
    "coding twice": HEAD + b"transfer-encoding: chunked\r\n" * 2 + b"\r\nf\r\n%b\r\n0\r\n\r\n" % BODY,
    "folded line": HEAD + b"x: y\r\n z\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "NUL in a value": HEAD + b"x: a\0b\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "bare CR in a value": HEAD + b"x: a\rb\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "signed length": HEAD + b"content-length: +%d\r\n\r\n%b" % (len(BODY), BODY),
}


def sending(data: bytes) -> Answer:
    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.write(data)

    return answer


@story
async def test_a_reply_that_could_be_read_in_two_ways_is_not_relayed() -> None:
    async with cluster(decode=1) as running:
        for name, reply in BAD_REPLIES.items():
            running.decode[0].answer = sending(reply)
            assert await statuses(running, sized() + BEHIND) == [502, 200], name
            running.decode[0].answer = serve_well
            assert await statuses(running, sized() + BEHIND) == [200, 200], name


@pytest.mark.parametrize(
    "first",
    [
        HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
        HEAD + b"transfer-encoding: chunked\r\n\r\nf\r\n%b\r\n0\r\n\r\n" % BODY,
    ],
)
@story
async def test_a_second_reply_behind_the_first_is_nobodys(first: bytes) -> None:
    async with cluster(decode=1) as running, running.client() as client:
        running.decode[0].answer = sending(first + SPLIT)
        client.send(sized())
        assert (await client.reply()).body == BODY
        running.decode[0].answer = serve_well
        client.send(sized())
        assert b"second" not in (await client.reply()).body
