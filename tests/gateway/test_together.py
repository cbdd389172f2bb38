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
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
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
    starting: frozenset[int] = frozenset()
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
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


@contextlib.asynccontextmanager
async def asking(member: Member, starting: frozenset[int] = frozenset()) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the admin side of the one process and those that are starting."""
    config = GatewayConfig(prefill=("http://a:1",), decode=("http://b:1",))
    transport = httpx.ASGITransport(together_app(Group({0: member}, config, starting)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


async def well(_: Request) -> Response:
    return PlainTextResponse("well")


@pytest.mark.parametrize("path", ["/x%00", "/x%0a", "//[", "/" + "x" * 65536])
@story
async def test_a_path_that_is_none_gets_404_and_those_who_ask_later_their_answer(path: str) -> None:
    async with linked(Starlette(routes=[Route("/health", well)])) as member, asking(member) as client:
        assert (await member.ask("GET", path, [], b"")).status == 404
        if len(path) < 65536:  # a longer one the client itself refuses
            assert (await client.get(f"http://x{path}")).status_code == 404
        assert (await client.get("/health")).text == "well"


@story
async def test_a_change_that_a_starting_process_would_miss_is_refused_before_any_makes_it() -> None:
    made: list[str] = []

    async def change(request: Request) -> Response:
        made.append(request.url.path)
        return PlainTextResponse("made")

    app = Starlette(routes=[Route("/reload", change, methods=["POST"]), Route("/health", well)])
    async with linked(app) as member:
        async with asking(member, frozenset({1})) as client:
            refused = await client.post("/reload")
            assert (refused.status_code, made) == (503, [])
            assert refused.json()["error"]["message"] == "process 1 is starting; ask again"
            assert (await client.get("/health")).text == "well"
        async with asking(member) as client:
            assert ((await client.post("/reload")).text, made) == ("made", ["/reload"])
