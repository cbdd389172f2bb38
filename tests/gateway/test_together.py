"""The admin side of several processes, without the processes: two ends of one link in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from stories import story

from coterie.gateway.config import GatewayConfig
from coterie.gateway.processes.child import _answering
from coterie.gateway.processes.parent import Member
from coterie.gateway.processes.together import together_app


@dataclass
class Group:
    """What `together_app` needs to know of the processes."""

    members: dict[int, Member]
    config: GatewayConfig
    restarts: list[int] = field(default_factory=lambda: [0])


class Ended:
    """A process that is over once its link is."""

    async def wait(self) -> int:
        return 0


@contextlib.asynccontextmanager
async def linked(app: Starlette) -> AsyncIterator[Member]:
    """A process whose admin side is `app`, as the first process knows it."""
    ours, theirs = socket.socketpair()
    member = Member(Ended(), *await asyncio.open_unix_connection(sock=ours))
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    living = asyncio.create_task(member.live(lambda: None))
    async with _answering(app, reader, writer):
        yield member
    writer.close()
    await living


@pytest.mark.parametrize("path", ["/x%00", "/x%0a", "//[", "/" + "x" * 65536])
@story
async def test_a_path_that_is_none_gets_404_and_those_who_ask_later_their_answer(path: str) -> None:
    app = Starlette(routes=[Route("/health", lambda _: PlainTextResponse("well"))])
    async with linked(app) as member, contextlib.AsyncExitStack() as stack:
        transport = httpx.ASGITransport(
            together_app(Group({0: member}, GatewayConfig(prefill=("http://a:1",), decode=("http://b:1",))))
        )
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://x"))
        assert (await member.ask("GET", path, [], b"")).status == 404
        if len(path) < 65536:
            assert (await client.get(f"http://x{path}")).status_code == 404
        assert (await client.get("/health")).text == "well"
