"""One of several processes of a gateway: serves clients, and answers the first process for the admin side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import msgspec
import uvloop
from starlette.types import ASGIApp

from coterie.engines.base import Engine
from coterie.errors import CoterieError, WireError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.http1 import error_body
from coterie.gateway.processes.control import Answer, Ask, Ready, Setup, receive, send
from coterie.gateway.processes.seat import Seat
from coterie.gateway.server import Serving, allow_descriptors, serving_on, until_told
from coterie.http_server import address_url, reserve, url_of

_ADMIN = "http://admin"


def run_process(descriptor: int, engine: Engine, describe: Callable[[Serving], Sequence[str]]) -> None:
    """Serve as the first process says, until SIGTERM or SIGINT, or until that process is gone.

    Args:
        descriptor: of the socket that leads to the first process.
        engine: the dialect of the workers.
        describe: what the process has to say of itself once it serves.
    """
    uvloop.run(_run(socket.socket(fileno=descriptor), engine, describe))


async def _run(link: socket.socket, engine: Engine, describe: Callable[[Serving], Sequence[str]]) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=link)
    with contextlib.closing(writer):
        try:
            setup = await receive(reader, Setup)
        except EOFError:
            return
        try:
            await until_told(
                _serving(setup, engine, reader, writer),
                on_ready=lambda served: send(writer, Ready(lines=tuple(describe(served)))),
            )
        except CoterieError as error:
            send(writer, Ready(problem=str(error)))
            with contextlib.suppress(ConnectionError):
                await writer.drain()


@contextlib.asynccontextmanager
async def _serving(
    setup: Setup, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[Serving]:
    config = msgspec.convert(setup.config, GatewayConfig)
    allow_descriptors(config.max_connections)
    seat = Seat.take(setup.process, setup.board, setup.rows, config.keep_sessions, setup.urls, setup.drained)

    def admin(app: ASGIApp) -> contextlib.AbstractAsyncContextManager[None]:
        return _answering(app, reader, writer)

    # Nothing is accepted before `listen`, which comes once this process serves: until then clients get the others.
    with contextlib.closing(seat), reserve(config.host, config.port, "port") as listener:
        async with serving_on(config, engine, listener, admin, seat, setup.source.read) as changes:
            url = url_of(listener, tls=config.tls_cert is not None)
            admin_url = address_url(config.admin_host, config.admin_port, tls=config.admin_tls)
            yield Serving(changes.gateway, changes, url, admin_url)


@contextlib.asynccontextmanager
async def _answering(app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    task = asyncio.create_task(_answer_all(app, reader, writer))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _answer_all(app: ASGIApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the admin side answer what the first process asks; when that is gone, stop as if told to."""
    try:
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False)) as client,
            asyncio.TaskGroup() as answers,
        ):
            while True:
                answers.create_task(_answer(client, await receive(reader, Ask), writer))
    except* (EOFError, WireError):
        os.kill(os.getpid(), signal.SIGTERM)


async def _answer(client: httpx.AsyncClient, ask: Ask, writer: asyncio.StreamWriter) -> None:
    try:
        reply = await client.request(ask.method, _ADMIN + ask.target, headers=ask.headers, content=ask.body)
    except httpx.InvalidURL as error:  # whoever asked made it up; it must not end the answers to others
        body = error_body(f"no path of the admin side: {error}", "not_found_error")
        send(writer, Answer(ask.number, 404, [(b"content-type", b"application/json")], body))
    else:
        send(writer, Answer(ask.number, reply.status_code, reply.headers.raw, reply.content))
