"""Sends mutated requests to a real gateway process in front of fake engines.

    python scripts/fuzz_http.py [--minutes 10] [--seed 1] [--clients 16]

Whatever a client sends, it is answered or its connection is closed, in bounded time and memory, and no other client
notices.  Looked at: every reply is HTTP, no error is the gateway's own fault, the engines get well-formed requests
alone, the gateway's memory and descriptors, its log, and a client that sends proper requests all the while.  The first
finding is printed with the bytes that were sent, and ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httptools
import yaml
from fuzz_envelope import mutate_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "gateway"))
from fake_engine import Exchange, FakeEngine, Kv, serve_well  # noqa: E402 - its folder is no package

from coterie.up.ports import PortChooser  # noqa: E402

REQUEST_S, IDLE_S = 1.0, 1.5
ANSWERED_S = 8.0
"""When a connection must have come to an end: its time-outs, and a busy machine."""

MEMORY_MIB = 150
_LIMITS = {
    "client_request_timeout_s": REQUEST_S, "client_idle_timeout_s": IDLE_S, "client_stall_timeout_s": 2.0,
    "max_body_bytes": 1 << 20, "decode_policy": "round_robin", "log_requests": False,
}  # fmt: skip

_TOKENS = (
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00", b" ", b"\t", b":", b"\xff", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9",
    b"Content-Length: 5\r\n", b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding : chunked\r\n",
    b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n",
    b"X-Request-Id: \r\n", b"Host: a\r\nHost: b\r\n", b" folded\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n",
    b"5;x=y\r\n", b'"stream":true,', b'"n":2,', b'"max_tokens":99999999999999999999,', b'"prompt":null,', b'{"a":',
    b"[", b'"\\ud800"', b'"kv_transfer_params":{"x":1},', b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
)  # fmt: skip


def good_requests() -> list[bytes]:
    """Requests as proper clients send them."""
    bodies = [
        b'{"model":"tiny","prompt":"Hello","max_tokens":2}',
        b'{"model":"tiny","prompt":[1,2,3],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}',
        b'{"model":"tiny","prompt":["a","b"],"n":2,"temperature":0.5,"stop":["x"]}',
    ]
    chat = b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"max_completion_tokens":2,"stream":true}'
    posts = [(b"/v1/completions", body) for body in bodies] + [(b"/v1/chat/completions", chat)]
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nx-request-id: fuzz\r\ncontent-type: application/json\r\n"
    sized = [(head + b"content-length: %d\r\n\r\n%b") % (path, len(body), body) for path, body in posts]
    chunked = [
        (head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n")
        % (path, 5, body[:5], len(body) - 5, body[5:])
        for path, body in posts
    ]
    gets = [b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in (b"/health", b"/v1/models", b"/nothing")]
    return [*sized, *chunked, *gets]


_GOOD = good_requests()


def bad_requests(rng: random.Random) -> bytes:
    """One or more requests, run together and mutated."""
    data = b"".join(rng.choices(_GOOD, k=rng.choice((1, 1, 1, 2, 5))))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        data = mutate_bytes(rng, data, _TOKENS)
    return data


async def serve_two_tokens(engine: FakeEngine, exchange: Exchange) -> None:
    """Answer as an engine does that reads all of a body: values pass the gateway unread, so they may be no JSON."""
    try:
        fields = json.loads(exchange.seen.body)
    except (ValueError, RecursionError):
        exchange.full(400, b'{"error": {"message": "not JSON", "type": "BadRequestError"}}')
        return
    stream = fields.get("stream") is True
    short = {**fields, "max_tokens": 2, "stream": stream}
    exchange.seen.body = json.dumps(short, separators=(",", ":")).encode()
    await serve_well(engine, exchange)


class Finding(Exception):  # noqa: N818
    """The gateway did what it must not."""


# --- one client ----------------------------------------------------------------------------------------


class _Replies:
    """Reads what a gateway sends as HTTP; raises what is not."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())


async def attack(rng: random.Random, port: int, data: bytes) -> list[int]:
    """Send bytes in one way of several, and read what comes; the statuses of the replies.

    Raises:
        Finding: what came is no HTTP, or the connection did not end in time.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    replies = _Replies()
    try:
        async with asyncio.timeout(ANSWERED_S):
            with suppress(OSError):
                await _send(rng, writer, data)
                while part := await reader.read(1 << 16):
                    replies.feed(part)
    except TimeoutError:
        raise Finding(
            f"neither answered nor closed within {ANSWERED_S:g} s; replies so far {replies.statuses}"
        ) from None
    except httptools.HttpParserError as error:
        raise Finding(f"the reply is no HTTP: {error}") from None
    finally:
        writer.transport.abort()
    return replies.statuses


async def _send(rng: random.Random, writer: asyncio.StreamWriter, data: bytes) -> None:
    """At once, in pieces, or broken off; most close their half a little later, the others keep the gateway waiting."""
    pieces = rng.choice((1, 1, 2, 20))
    size = max(1, len(data) // pieces)
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await writer.drain()
        if pieces > 1:
            await asyncio.sleep(rng.choice((0, 0, 0.005)))
    if rng.random() < 0.05:
        writer.transport.abort()
    elif rng.random() < 0.95:
        await asyncio.sleep(rng.choice((0, 0.02, 0.1)))
        writer.write_eof()


# --- all of them ---------------------------------------------------------------------------------------


class Gateway:
    """The process that is fuzzed, with two fake engines behind it.

    Attributes:
        port: of its client side.
        admin_url: of its admin side.
        engines: the fakes.
    """

    def __init__(self, folder: Path) -> None:
        self.port, self._admin_port = PortChooser(os.getpid()).ports(0, 2, "gateway")
        self.admin_url = f"http://127.0.0.1:{self._admin_port}"
        self.engines = [FakeEngine(Kv()), FakeEngine(Kv())]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for engine in self.engines:
            engine.answer = serve_two_tokens
            await engine.start()
        process = self._process = self._launch()
        try:
            await self._wait_ready()
            yield
        finally:
            process.kill()
            process.wait()
            for engine in self.engines:
                await engine.stop()

    def _launch(self) -> subprocess.Popen[bytes]:
        urls = {"prefill": [self.engines[0].url], "decode": [self.engines[1].url]}
        ports = {"port": self.port, "admin_port": self._admin_port}
        file = self._folder / "gateway.yaml"
        file.write_text(yaml.safe_dump({**_LIMITS, **ports, **urls}))
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "coterie", "serve", "--config", str(file)]
            return subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def _log(self) -> Path:
        return self._folder / "gateway.log"

    async def _wait_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                self.check_alive()
                with suppress(OSError):
                    if await well(self.port) == 200:
                        return
                await asyncio.sleep(0.1)

    def check_alive(self) -> None:
        """Raise if the process ended, or logged a traceback."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise Finding(f"the gateway ended with {self._process.returncode}:\n{self._log.read_text()[-3000:]}")
        if "Traceback" in (text := self._log.read_text(errors="replace")):
            raise Finding(f"the gateway logged:\n{text[text.index('Traceback') - 500 :][:4000]}")

    def memory_mib(self) -> float:
        """Resident memory of the process."""
        assert self._process is not None
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def descriptors(self) -> int:
        """Open files and sockets of the process."""
        assert self._process is not None
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def check_engines(self) -> None:
        """Raise if an engine got what the gateway must not send on."""
        for engine in self.engines:
            for seen in engine.seen:
                if seen.method != "POST" or "transfer-encoding" in seen.headers or not seen.body.startswith(b"{"):
                    raise Finding(f"an engine was sent {seen.method} {seen.target} {seen.headers} {seen.body[:500]!r}")
            engine.seen.clear()


async def well(port: int) -> int:
    """Status of a proper completion."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_GOOD[0].replace(b"x-request-id", b"connection: close\r\nx-request-id"))
        reply = await reader.read()
        return int(reply.split(b" ", 2)[1]) if reply else 0
    finally:
        writer.transport.abort()


async def proper_client(port: int, waits_s: list[float]) -> None:
    """Send proper requests for ever.

    Raises:
        Finding: one was not served.
    """
    while True:
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWERED_S):
                status = await well(port)
        except (TimeoutError, OSError) as error:
            raise Finding(f"a proper client was not served: {error!r}") from None
        if status != 200:
            raise Finding(f"a proper client got status {status}")
        waits_s.append(time.monotonic() - start_s)
        await asyncio.sleep(0.05)


async def fuzz(seed: int, clients: int, goes_on: Callable[[int], bool]) -> tuple[Counter[str], list[float]]:
    """Attack with `clients` at once while `goes_on(number of attacks)`.

    Returns:
        How often each status came, and how long the proper client waited for each of its replies, in seconds.

    Raises:
        Finding: naming what happened, after which bytes.
    """
    ends: Counter[str] = Counter()
    waits_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(Path(folder))
        async with gateway.running():
            await _attack_all(gateway, seed, clients, goes_on, ends, waits_s)
    return ends, waits_s


async def _attack_all(
    gateway: Gateway, seed: int, clients: int, goes_on: Callable[[int], bool], ends: Counter[str], waits_s: list[float]
) -> None:
    least_mib, begun = gateway.memory_mib(), 0

    async def one(number: int) -> None:
        nonlocal begun
        rng = random.Random(f"{seed} {number}")
        while goes_on(begun):
            begun += 1
            data = bad_requests(rng)
            try:
                statuses = await attack(rng, gateway.port, data)
                gateway.check_engines()
                if bad := {500, 502, 504} & {*statuses}:
                    raise Finding(f"status {bad}")
            except Finding as finding:
                raise Finding(f"{finding}\nafter {data!r}") from None
            ends.update(map(str, statuses or ["closed"]))

    async def watch() -> None:
        while True:
            gateway.check_alive()
            if (grown := gateway.memory_mib() - least_mib) > MEMORY_MIB:
                raise Finding(f"the gateway's memory has grown by {grown:.0f} MiB")
            await asyncio.sleep(1)

    beside = [asyncio.create_task(watch()), asyncio.create_task(proper_client(gateway.port, waits_s))]
    attackers = [asyncio.create_task(one(number)) for number in range(clients)]
    try:
        await _first_failure(attackers, beside)
        await asyncio.sleep(IDLE_S + 1)
        gateway.check_alive()
        if gateway.descriptors() > 60:
            raise Finding(f"{gateway.descriptors()} descriptors are open after all clients left")
    finally:
        for task in (*beside, *attackers):
            task.cancel()
        await asyncio.gather(*beside, *attackers, return_exceptions=True)


async def _first_failure(attackers: list[asyncio.Task[None]], beside: list[asyncio.Task[None]]) -> None:
    """Wait for all attackers, or for whatever fails first."""
    waiting = {*attackers, *beside}
    while any(not attacker.done() for attacker in attackers):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    try:
        ends, waits_s = asyncio.run(fuzz(options.seed, options.clients, lambda _: time.monotonic() < end_s))
    except Finding as finding:
        sys.exit(f"found: {finding}")
    print(f"{ends.total()} replies: " + ", ".join(f"{count} x {end}" for end, count in ends.most_common()))
    waits_s.sort()
    p99_s = waits_s[int(0.99 * len(waits_s))]
    print(f"a proper client: {len(waits_s)} served, p99 {p99_s:.3f} s, worst {waits_s[-1]:.3f} s")


if __name__ == "__main__":
    main()
