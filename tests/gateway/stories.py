"""What the gateway's tests share: a gateway in front of fakes, in one event loop, and a client of raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import uvloop
from fake_engine import Answer, FakeEngine, Kv, serve_well

from coterie.core import ExpertCounts
from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.admin.changes import Changes
from coterie.gateway.config import GatewayConfig
from coterie.gateway.gateway import Gateway
from coterie.gateway.server import serving

COMPLETIONS = "/v1/completions"


def story(test: Callable[..., Awaitable[None]], within_s: float = 60) -> Callable[..., None]:
    """Run an asynchronous test in a loop of its own, for at most a minute."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), within_s))

    return run


long_story = functools.partial(story, within_s=240)
"""The same for one that starts many processes, which takes long where others are busy."""


@dataclass
class Reply:
    """A reply as the client sees it."""

    status: int
    headers: dict[str, str]
    raw: bytes
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """One client connection; speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, body: bytes, path: str = COMPLETIONS, headers: str = "") -> None:
        self.send(post(body, path, headers))

    async def reply(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        status = int(head[0].split(" ")[1])
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        if status == 100:
            return Reply(100, headers, b"", b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, *await self._chunks())
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Reply(status, headers, body, body)

    async def _chunks(self) -> tuple[bytes, bytes]:
        raw, body = [], []
        while True:
            line = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(line, 16) + 2)
            raw += [line, data]
            body.append(data[:-2])
            if line == b"0\r\n":
                return b"".join(raw), b"".join(body)

    async def at_end(self) -> bool:
        """Whether the gateway closes, rather than resets or keeps, the connection."""
        return await asyncio.wait_for(self.reader.read(1), 5) == b""

    def leave(self) -> None:
        self.writer.transport.abort()


@dataclass
class Cluster:
    """A gateway in front of fakes."""

    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    kv: Kv
    gateway: Gateway
    url: str
    admin_url: str
    changes: Changes

    @contextlib.asynccontextmanager
    async def client(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawClient]:
        host, port = self.url.partition("://")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20, ssl=tls)
        try:
            yield RawClient(reader, writer)
        finally:
            writer.transport.abort()

    async def post(self, body: Any, path: str = COMPLETIONS, headers: str = "") -> Reply:
        async with self.client() as client:
            client.post(body if isinstance(body, bytes) else json.dumps(body).encode(), path, headers)
            return await client.reply()

    async def get(self, path: str) -> Reply:
        async with self.client() as client:
            client.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            return await client.reply()

    @property
    def engines(self) -> list[FakeEngine]:
        return [*self.prefill, *self.decode]

    def forget_probes(self) -> None:
        for engine in self.engines:
            engine.seen.clear()

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"coterie_{name}", labels or None) or 0.0

    async def idle(self) -> None:
        """Wait until every request is over, then check that nothing is left of them."""
        fleets = (self.gateway.prefill, self.gateway.decode)
        await eventually(lambda: not any(s.requests for fleet in fleets for s in fleet.ledger.states()))
        await eventually(lambda: not self.gateway.dispatcher.handoffs.background)
        for fleet in fleets:
            assert all(state.tokens == 0 for state in fleet.ledger.states())
            assert all(total.given == total.released for total in fleet.ledger.totals().values())


def post(body: bytes, path: str = COMPLETIONS, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


async def eventually(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until `condition` holds."""
    end_s = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < end_s, "it did not happen in time"
        await asyncio.sleep(0.01)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def configured(prefill: list[FakeEngine], decode: list[FakeEngine], **settings: Any) -> GatewayConfig:
    defaults: dict[str, Any] = {"port": 0, "admin_port": 0, "decode_policy": "round_robin", "shutdown_grace_s": 0.1}
    return GatewayConfig(
        prefill=tuple(engine.url for engine in prefill),
        decode=tuple(engine.url for engine in decode),
        **{**defaults, **settings},
    )


@contextlib.asynccontextmanager
async def fakes(
    count: int,
    kv: Kv,
    counts: ExpertCounts | None = None,
    answer: Answer = serve_well,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[list[FakeEngine]]:
    engines = [FakeEngine(kv, counts=counts) for _ in range(count)]
    for engine in engines:
        engine.answer, engine.tls = answer, tls
        await engine.start()
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


@contextlib.asynccontextmanager
async def cluster(
    prefill: int = 1,
    decode: int = 2,
    *,
    counts: ExpertCounts | None = None,
    answer: Answer = serve_well,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """A running gateway in front of healthy fakes, or of such as answer or are reached in another way."""
    kv = Kv()
    async with (
        fakes(prefill, kv, counts, answer, tls) as prefills,
        fakes(decode, kv, None, answer, tls) as decodes,
        serving(configured(prefills, decodes, **settings), VllmNixl()) as served,
    ):
        running = Cluster(prefills, decodes, kv, served.gateway, served.url, served.admin_url, served.changes)
        running.forget_probes()
        yield running
