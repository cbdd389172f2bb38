"""A server that speaks vLLM's disaggregated dialect over a real socket, and fails as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from coterie import wire
from coterie.core import ExpertCounts

JSON = b"content-type: application/json\r\n"
METRICS = b"""vllm:external_prefix_cache_hits_total{engine="0"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 0.0
"""


@dataclass
class Kv:
    """KV that prefill fakes keep and decode fakes collect: whatever stays in `held` is stranded."""

    held: set[str] = field(default_factory=set)
    kept: int = 0

    def keep(self) -> str:
        self.kept += 1
        name = f"kv-{self.kept}"
        self.held.add(name)
        return name


@dataclass
class Seen:
    """One request as the fake received it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    head: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_prefill(self) -> bool:
        return b'"do_remote_decode":true' in self.body


class Exchange:
    """What an answer may do with one request's connection."""

    def __init__(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        self.seen = seen
        self.writer = writer
        self.keep_alive = True

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def head(self, status: int, headers: bytes) -> None:
        self.write(b"HTTP/1.1 %d Whatever\r\nserver: fake\r\n%b\r\n" % (status, headers))

    def full(self, status: int, body: bytes, headers: bytes = JSON) -> None:
        self.head(status, headers + b"content-length: %d\r\n" % len(body))
        self.write(body)

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def reset(self) -> None:
        self.keep_alive = False
        self.writer.transport.abort()

    def close(self) -> None:
        self.keep_alive = False
        self.writer.close()


Answer = Callable[["FakeEngine", Exchange], Awaitable[None]]


def event(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "text": text, "delta": {"content": text}}]}).encode()


async def serve_well(engine: FakeEngine, exchange: Exchange) -> None:
    """Answer as a healthy server does."""
    seen = exchange.seen
    if seen.is_prefill:
        exchange.full(200, engine.prefill_reply())
        return
    body = seen.json
    if body.get("model", "tiny") not in ("tiny", *engine.models):
        if engine.frees_what_it_refuses:
            engine.collect(seen)
        exchange.full(404, b'{"error": {"message": "no such model"}}')
        return
    engine.collect(seen)
    tokens = [f"t{i} " for i in range(body.get("max_tokens") or 4)]
    if not body.get("stream"):
        text = "".join(tokens)
        choice = {
            "index": 0,
            "text": text,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "length",
        }
        exchange.full(
            200, json.dumps({"id": "x", "object": "y", "created": 1, "model": "tiny", "choices": [choice]}).encode()
        )
        return
    exchange.head(200, b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n")
    for token in tokens:
        await asyncio.sleep(engine.token_delay_s)
        exchange.chunk(event(token))
        await exchange.writer.drain()
    exchange.chunk(b"data: [DONE]\n\n")
    exchange.write(b"0\r\n\r\n")


class FakeEngine:
    """One fake server; a prefill and a decode server in one, as vLLM is.

    Set `answer` to replace how requests are answered; `health` and `models` for the probes, `metrics` for readings.
    """

    def __init__(self, kv: Kv | None = None, *, counts: ExpertCounts | None = None) -> None:
        self.kv = kv or Kv()
        self.counts = counts
        self.envelope: Any = None
        self.health = 200
        self.silent = False  # GET is never answered
        self.metrics = METRICS
        self.settings: bytes | None = None
        self.models = ["tiny"]
        self.frees_what_it_refuses = True  # as vLLM does once it has taken KV from the prefill server
        self.token_delay_s = 0.0
        self.answer: Answer = serve_well
        self.seen: list[Seen] = []
        self.gets: list[Seen] = []
        self.aborted = 0
        self.connections = 0
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http{'s' * bool(self.tls)}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Die: refuse connections, reset those that are open."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def prefill_reply(self) -> bytes:
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "remote_request_id": self.kv.keep(),
            "remote_block_ids": [[1, 2]],
        }
        if self.envelope is not None or self.counts is not None:
            params["coterie"] = self.envelope or wire.encode_counts(self.counts)
        return json.dumps({"id": "p", "usage": {"prompt_tokens": 7}, "kv_transfer_params": params}).encode()

    def collect(self, seen: Seen) -> None:
        params = seen.json.get("kv_transfer_params")
        if params:
            self.kv.held.discard(params["remote_request_id"])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._serve_one(reader, writer):
                    pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        head = text.split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        exchange = Exchange(Seen(method, target, headers, body, text), writer)
        if method == "GET":
            self.gets.append(exchange.seen)
            if self.silent:
                await reader.read()
                return False
            if target == "/health":
                exchange.full(self.health, b"")
            elif target == "/metrics":
                exchange.full(200, self.metrics, b"content-type: text/plain\r\n")
            elif target.startswith("/server_info"):
                exchange.full(404 if self.settings is None else 200, self.settings or b"{}")
            else:
                exchange.full(200, json.dumps({"object": "list", "data": [{"id": m} for m in self.models]}).encode())
            return True
        self.seen.append(exchange.seen)
        await self._answer_unless_left(reader, exchange)
        return exchange.keep_alive

    async def _answer_unless_left(self, reader: asyncio.StreamReader, exchange: Exchange) -> None:
        answering = asyncio.ensure_future(self.answer(self, exchange))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            left = not answering.done()
        finally:
            for task in (answering, leaving):
                task.cancel()
            error, _ = await asyncio.gather(answering, leaving, return_exceptions=True)
        if left or isinstance(error, ConnectionError):
            self.aborted += 1
            exchange.keep_alive = False
        elif error is not None:
            raise error


# --- ways to fail ------------------------------------------------------------------------------------


async def hang(engine: FakeEngine, exchange: Exchange) -> None:
    """Take the request and never answer."""
    await asyncio.Event().wait()


async def reset(engine: FakeEngine, exchange: Exchange) -> None:
    """Reset the connection instead of answering."""
    exchange.reset()


async def garbage(engine: FakeEngine, exchange: Exchange) -> None:
    """Answer with something that is not HTTP."""
    exchange.write(b"\x16\x03\x01 not http at all\r\n\r\n")
    await asyncio.sleep(0.05)


def half(status: int) -> Answer:
    """Break off amid a reply that is no stream."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.head(status, b"content-length: 100\r\n")
        exchange.write(b"x" * 50)
        await exchange.writer.drain()
        await asyncio.sleep(0.05)
        exchange.reset()

    return answer


def refuse(status: int, body: bytes, headers: bytes = JSON) -> Answer:
    """Answer with an error."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        exchange.full(status, body, headers)

    return answer


def die_after(chunks: int, *, cut: bytes = b"") -> Answer:
    """Stream some chunks, perhaps a cut one, then reset."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        engine.collect(exchange.seen)
        exchange.head(200, b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n")
        for i in range(chunks):
            exchange.chunk(event(f"t{i} "))
        exchange.write(cut)
        await exchange.writer.drain()
        await asyncio.sleep(0.05)
        exchange.reset()

    return answer


def when(wanted: Callable[[Seen], bool], then: Answer) -> Answer:
    """Answer some requests in another way, the rest well."""

    async def answer(engine: FakeEngine, exchange: Exchange) -> None:
        await (then if wanted(exchange.seen) else serve_well)(engine, exchange)

    return answer
