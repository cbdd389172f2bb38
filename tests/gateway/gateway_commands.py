"""`coterie serve` as processes, in front of fakes in this one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from fake_engine import FakeEngine
from stories import RawClient, post

BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": %d, "stream": true}'


@dataclass
class Serving:
    """`coterie serve`, as a process."""

    process: asyncio.subprocess.Process
    url: str
    admin: httpx.AsyncClient

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield RawClient(reader, writer)
        finally:
            writer.transport.abort()

    async def get(self, path: str) -> Any:
        return (await self.admin.get(path)).json()

    async def metric(self, name: str) -> dict[str, float]:
        """Values of a series by process, summed over its other labels."""
        text = (await self.admin.get("/metrics")).text
        found: dict[str, float] = {}
        for labels, value in re.findall(rf"^coterie_{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
            process = re.search(r'process="(\d)"', labels)[1]
            found[process] = found.get(process, 0.0) + float(value)
        return found

    async def until(self, name: str, wanted: dict[str, float]) -> None:
        async with asyncio.timeout(30):
            while await self.metric(name) != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def loads(self) -> dict[str, int]:
        return {row["name"]: row["requests"] for row in (await self.get("/workers"))["workers"]}

    async def load(self, requests: float) -> None:
        """Wait until all gateways together hold so many requests at decode workers, as this one sees it."""
        async with asyncio.timeout(30):
            while await self._decoding() != requests:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _decoding(self) -> int:
        return sum(held for name, held in (await self.loads()).items() if name.startswith("decode"))

    async def pids(self, lines: int) -> dict[int, int]:
        """Processes by number, of the next lines that say who serves."""
        found: dict[int, int] = {}
        while len(found) < lines:
            line = (await self.process.stderr.readline()).decode()
            assert line, "it ended"
            if match := re.search(r"process (\d) \(pid (\d+)\) serves", line):
                found[int(match[1])] = int(match[2])
        return found


@contextlib.asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coterie", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        _, said = await process.communicate()
        print((said or b"").decode())  # shown where the test fails


@contextlib.asynccontextmanager
async def served_by(prefill: list[FakeEngine], decode: list[FakeEngine], *arguments: str) -> AsyncIterator[Serving]:
    urls = [
        part
        for role, engines in (("prefill", prefill), ("decode", decode))
        for engine in engines
        for part in (f"--{role}", engine.url)
    ]
    ports = ["--port", "0", "--admin-port", "0", "--shutdown-grace-s", "5", "--decode-policy", "round_robin"]
    async with started(*urls, *ports, *arguments) as process:
        said = ""
        while "admin " not in said:
            line = await process.stdout.readline()
            assert line, (await process.stderr.read()).decode()
            said += line.decode()
        url = re.search(r"serving +(\S+)", said)[1]
        admin = re.search(r"admin +(http://[^/]+)", said)[1]
        async with httpx.AsyncClient(base_url=admin, timeout=30) as client:
            yield Serving(process, url, client)


async def streams(served: Serving, stack: contextlib.AsyncExitStack, count: int, tokens: int) -> list[RawClient]:
    """Clients whose streams have begun, one after another: two processes that choose at once may choose alike."""
    clients = [await stack.enter_async_context(served.client()) for _ in range(count)]
    for client in clients:
        client.send(post(BODY % tokens))
        await client.reader.readuntil(b"data: ")
    return clients


async def rest(client: RawClient) -> bytes:
    """What else a client gets, to the end or the reset of its stream."""
    read = b""
    with contextlib.suppress(ConnectionError):
        while not read.endswith(b"0\r\n\r\n") and (data := await client.reader.read(1 << 16)):
            read += data
    return read
