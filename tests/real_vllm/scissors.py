"""A gateway whose connections to decode servers can be cut within a stream: the servers live on for other tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.config import GatewayConfig
from coterie.gateway.server import Serving, serving


class Scissors:
    """Proxies in front of servers, which together cut one stream.

    Attributes:
        events: cut the next stream within the event after so many, at least one; None to cut none.
        begun: set by the client when it has got a part of the stream.
    """

    def __init__(self) -> None:
        self.events: int | None = None
        self.begun = asyncio.Event()

    @contextlib.asynccontextmanager
    async def before(self, url: str) -> AsyncIterator[str]:
        """A proxy for a server; yields its URL."""
        parts, running = urlsplit(url), list[asyncio.Task[None]]()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there_reader, there = await asyncio.open_connection(parts.hostname, parts.port)
            ways = [
                asyncio.ensure_future(_pump(reader, there)),
                asyncio.ensure_future(self._back(there_reader, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                there.transport.abort()
                writer.close()  # a reset would take back what the gateway has not read yet

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            running.append(asyncio.create_task(between(reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for connection in running:  # those that the gateway kept, too
                connection.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = 0
        while data := await reader.read(1 << 16):
            seen = 0 if data.startswith(b"HTTP/1.1 ") else seen  # of this reply
            events = data.split(b"\n\n")  # however many came at once
            if self.events is not None and seen + len(events) - 1 > self.events:
                whole = self.events - seen
                writer.write(b"".join(event + b"\n\n" for event in events[:whole]))
                await self.begun.wait()  # else nothing has gone out, and the request simply goes to another server
                writer.write(events[whole][:-20])
                await writer.drain()
                self.events = None
                return
            seen += len(events) - 1
            writer.write(data)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@contextlib.asynccontextmanager
async def cutting_gateway(prefill: list[str], decode: list[str]) -> AsyncIterator[tuple[Serving, Scissors]]:
    """A gateway in this process, in front of real servers."""
    scissors = Scissors()
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(scissors.before(url)) for url in decode]
        config = GatewayConfig(
            prefill=tuple(prefill), decode=tuple(proxies), decode_policy="round_robin", port=0, admin_port=0,
            breaker_failures=1000,
        )  # fmt: skip
        yield await stack.enter_async_context(serving(config, VllmNixl())), scissors
