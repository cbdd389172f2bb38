"""`GET /nixl`: gives a slot for as long as the connection is open; see `transport.nixl.handshake`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coterie.experts.monitor.messages import Problem
from coterie.experts.transport.nixl import NixlServer
from coterie.json_http import JSON, json_reply

_HEADERS = [(b"content-type", JSON.encode())]


class SlotResponse(Response):
    """An answer that does not end while the client has its slot, or a refusal.

    Args:
        nixl: whose slots they are.
        over: is set when all clients are to leave.
    """

    def __init__(self, nixl: NixlServer, over: asyncio.Event) -> None:
        super().__init__()
        self._nixl, self._over = nixl, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        place = self._nixl.claim(time.monotonic())
        if place is None:
            await refusal("no slot for NIXL is free now; start it with more", 503)(scope, receive, send)
            return
        try:
            content = msgspec.json.encode(self._nixl.invite(place)) + b"\n"
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": content, "more_body": True})
            await _first(_left(receive), self._over.wait())
            await send({"type": "http.response.body"})
        finally:
            self._nixl.release(place, time.monotonic())


def slot_for(nixl: NixlServer | None, own: str, wanted: str | None, over: asyncio.Event) -> Response:
    """The answer to who wants a slot of the server with this id."""
    if nixl is None:
        return refusal("it takes no requests by NIXL; start it with --nixl", 404)
    if wanted != own:
        return refusal("died; another one has its URL", 409)
    return SlotResponse(nixl, over)


def refusal(problem: str, status: int) -> Response:
    """Why there is no slot."""
    return json_reply(Problem(problem), status)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(*awaited: Coroutine[Any, Any, object]) -> None:
    """Wait for one of several."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
