"""Stands between a gateway and one engine, passes everything on, and fails when it is told to.

A fault has one of three moments, which follow one request:

    gateway ── request ──> proxy ──> engine ── computes ──> proxy ── reply, byte by byte ──> gateway
               BEFORE: the fault is there      WAITING: it was sent on,          MIDST: a part of the reply
               when the request arrives        no byte of a reply went back      has gone back

Only completions and chats are failed, never health checks: a worker that is well by its health alone is the hard case.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

SLOW_S = 0.3
"""How late a slow worker is with each step of its work; well below every deadline of the tests' gateway."""

MIDST_EVENTS = 4
"""Events of a stream that go back before a fault in its midst."""

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards what is not yet sent, and resets
_GARBAGE = b"\x16\x03\x01\x02\x00 this is no HTTP \xff\xfe\r\n\r\n"
_T = TypeVar("_T")


class Moment(Enum):
    """Where a request is when the fault comes."""

    BEFORE = "before it is sent"
    WAITING = "while it waits"
    MIDST = "amid the reply"


class Stop(Exception):  # noqa: N818 - not an error: how a fault ends a connection
    """Nothing more is passed on over this connection."""


Behaviour = Callable[["Tunnel"], Awaitable[None]]
"""What befalls a request: returns where it goes on after all."""


async def hang(_: Tunnel) -> None:
    """Neither answer nor close, as where a cable was pulled."""
    await asyncio.Event().wait()


async def dawdle(tunnel: Tunnel) -> None:
    """Be late, then go on; and so with each further piece."""
    tunnel.late_s = SLOW_S / 4
    await asyncio.sleep(SLOW_S)


async def reset(_: Tunnel) -> None:
    """Reset the connection."""
    raise Stop


async def babble(tunnel: Tunnel) -> None:
    """Send what is no HTTP, neither as a head nor within a body."""
    await tunnel.answer(_GARBAGE)
    raise Stop


def refuse(status: int) -> Behaviour:
    """Answer with an error of the worker's own."""
    body = b'{"error": {"message": "made to fail", "type": "InternalServerError", "param": null, "code": %d}}' % status
    head = b"HTTP/1.1 %d Whatever\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

    async def answer(tunnel: Tunnel) -> None:
        await tunnel.answer(head % (status, len(body)) + body)
        await asyncio.sleep(0.05)  # so that it is read before the reset that follows
        raise Stop

    return answer


class Trap:
    """Waits for the first request that gets to a moment at any of several proxies, and springs once.

    Args:
        moment: which.
        act: what befalls that request.

    Attributes:
        caught: the proxy that the request went through, once there was one.
    """

    def __init__(self, moment: Moment, act: Behaviour) -> None:
        self.moment = moment
        self.caught: Future[FaultProxy] = Future()
        self._act = act

    async def spring(self, tunnel: Tunnel, moment: Moment) -> None:
        """Let the request pass, unless it is the first to get here."""
        if moment is self.moment and not self.caught.done():
            self.caught.set_result(tunnel.proxy)
            await self._act(tunnel)


class Tunnel:
    """One connection of the gateway, and its twin to the engine."""

    def __init__(
        self, proxy: FaultProxy, gateway: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        engine: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:  # fmt: skip
        self.proxy = proxy
        self.late_s = 0.0
        self._from_gateway, self._to_gateway = gateway
        self._from_engine, self._to_engine = engine
        self._computes = False  # whether the request under way is a completion
        self._events = 0  # of its reply so far
        self._free = asyncio.Event()  # replies may pass: set unless a fault holds them
        self._free.set()

    async def run(self) -> None:
        """Pass requests and replies on until either side closes or a fault ends it."""
        ways = {asyncio.create_task(self._requests()), asyncio.create_task(self._replies())}
        broken = True
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            broken = any(isinstance(way.exception(), (Stop, ConnectionError)) for way in done)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._close(broken=broken)

    async def answer(self, data: bytes) -> None:
        """Send the gateway bytes of the proxy's own."""
        self._to_gateway.write(data)
        await self._to_gateway.drain()

    async def _requests(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await self._from_gateway.readuntil(b"\r\n\r\n")
                body = await self._from_gateway.readexactly(_length(head))
                self._computes, self._events, self.late_s = head.startswith(b"POST"), 0, 0.0
                await self._hold(Moment.BEFORE)
                self._to_engine.write(head + body)
                await self._hold(Moment.WAITING)
        self._to_engine.write_eof()
        await asyncio.Event().wait()  # a reply that is on its way may still be wanted: the engine closes

    async def _hold(self, moment: Moment) -> None:
        """Let a fault befall the request, while no reply passes."""
        if not self._computes:
            return
        self._free.clear()
        if moment is Moment.BEFORE and self.proxy.behaviour is not None:
            await self.proxy.behaviour(self)
        if self.proxy.trap is not None:
            await self.proxy.trap.spring(self, moment)
        self._free.set()

    async def _replies(self) -> None:
        while data := await self._from_engine.read(1 << 16):
            await self._free.wait()
            if self._computes:
                data = await self._pass_midst(data)
            await self.answer(data)
            await asyncio.sleep(self.late_s)

    async def _pass_midst(self, data: bytes) -> bytes:
        """Pass the first part of a reply on and let a fault come; what is left after it."""
        trap = self.proxy.trap
        if trap is None or trap.moment is not Moment.MIDST or trap.caught.done():
            return data
        cut = self._midst(data)
        if cut:
            await self.answer(data[:cut])
            await trap.spring(self, Moment.MIDST)
        return data[cut:]

    def _midst(self, data: bytes) -> int:
        """Bytes of `data` before the midst of the reply; 0 where that is not in it.

        Of a stream, after some events; else in the middle of the bytes that came first.
        """
        if not self._events and b"text/event-stream" not in data[:1024].lower():
            return len(data) - 20
        self._events += data.count(b"\n\n")
        return len(data) if self._events >= MIDST_EVENTS else 0

    def _close(self, *, broken: bool) -> None:
        for writer in (self._to_gateway, self._to_engine):
            if broken:
                with contextlib.suppress(OSError):  # it is closed already
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            writer.close()


def _length(head: bytes) -> int:
    lengths = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0]) if lengths else 0


class FaultProxy:
    """Listens on a port of its own in front of one engine; its methods may be called from any thread.

    Attributes:
        name: the engine's.
        port: where it listens.
        behaviour: what befalls each completion that arrives; None for nothing.
        trap: what lies in wait for one request; None for nothing.
    """

    def __init__(self, name: str, engine_port: int, loop: ProxyLoop) -> None:
        self.name = name
        self.port = 0
        self.behaviour: Behaviour | None = None
        self.trap: Trap | None = None
        self._engine_port = engine_port
        self._loop = loop
        self._server: asyncio.Server | None = None
        self._tunnels: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the gateway reaches the engine."""
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listen, at the second time on the same port."""
        self._loop.call(self._open())

    def cut(self) -> None:
        """Refuse connections, and reset those that are open, as the kernel does for a killed process."""
        self._loop.call(self._cut())

    def mend(self) -> None:
        """Fail no more; what hung is reset."""
        self.behaviour = self.trap = None
        self._loop.call(self._drop())

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        self.shut()
        await self._drop()

    def shut(self) -> None:
        """Refuse connections from now on; for behaviours, which run in the proxies' thread."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _drop(self) -> None:
        for task in self._tunnels:
            task.cancel()
        await asyncio.gather(*self._tunnels, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tunnels.add(task)
        try:
            engine = await asyncio.open_connection("127.0.0.1", self._engine_port)
            await Tunnel(self, (reader, writer), engine).run()
        except (OSError, asyncio.CancelledError):  # the engine is gone; or the proxy is cut, and waits for this
            writer.transport.abort()
        finally:
            writer.close()
            self._tunnels.discard(task)


class ProxyLoop:
    """The thread in which proxies run, apart from the tests and from the gateway; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def __enter__(self) -> ProxyLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
