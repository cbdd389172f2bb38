"""The asking side of a KV handoff: copies a prompt's blocks into this worker's cache and ends the lease.

On the holder's own host the bytes are read from its shared-memory file, otherwise from its socket.  In both cases a
DONE that is answered HELD is what makes the copy good.  Everything runs on the worker's event loop, under one deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import numpy as np

from coterie.engines.embedded.kv import KvFile, NeighbourFile
from coterie.engines.embedded.messages import Message, Operation, RemoteKv, Status, read_answer
from coterie.errors import CoterieError, EngineError

Transport = Literal["auto", "shm", "tcp"]
Done = Callable[[str | None], None]
"""Told once how a pull ended: None if the KV is there, else what went wrong."""

_BLOCKS_AT_ONCE = 16
_BUFFER_BYTES = 1 << 20
_log = logging.getLogger("coterie.engine")


class Pulls(Protocol):
    """What the engine's thread may ask for; both methods return at once."""

    def start(self, remote: RemoteKv, first: int, blocks: Sequence[int], done: Done) -> None:
        """Copy the remote blocks from number `first` on to this cache's `blocks`, and end the lease.

        What follows the last of `blocks` is not copied.  `done` is called from another thread.
        """
        ...

    def drop(self, remote: RemoteKv) -> None:
        """End the lease of KV that is not wanted after all."""
        ...


class Puller:
    """The `Pulls` of a worker.

    Args:
        kv: where the bytes go.
        transport: "shm" and "tcp" force a way; "auto" takes shared memory where the holder's file can be opened.
        deadline_s: the longest that one pull may take.
    """

    def __init__(self, kv: KvFile, transport: Transport, deadline_s: float) -> None:
        self._kv = kv
        self._transport = transport
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, remote: RemoteKv, first: int, blocks: Sequence[int], done: Done) -> None:
        """See `Pulls`."""
        self._loop.call_soon_threadsafe(self._spawn, lambda: self._run(remote, first, tuple(blocks), done))

    def drop(self, remote: RemoteKv) -> None:
        """See `Pulls`."""
        self._loop.call_soon_threadsafe(self._spawn, lambda: self._drop(remote))

    async def close(self) -> None:
        """End all pulls under way; they fail.  Leases that are being dropped get a second."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, remote: RemoteKv, first: int, blocks: tuple[int, ...], done: Done) -> None:
        problem: str | None = "the pull was broken off"
        try:
            await self._pull(remote, first, blocks)
            problem = None
        except CoterieError as error:
            problem = str(error)
        finally:
            done(problem)

    async def _drop(self, remote: RemoteKv) -> None:
        try:
            await self._pull(remote, 0, ())
        except CoterieError as error:
            _log.info("a handoff could not be released: %s", error)

    async def _pull(self, remote: RemoteKv, first: int, blocks: tuple[int, ...]) -> None:
        where = f"KV of request {remote.request_id} at {remote.host}:{remote.port}"
        if first + len(blocks) > len(remote.blocks):
            raise EngineError(f"{where}: {len(remote.blocks)} blocks, but {first + len(blocks)} are needed here")
        try:
            async with asyncio.timeout(self._deadline_s), _connected(remote) as peer:
                if blocks:
                    await self._copy(peer, remote, first, blocks)
                await peer.ask(self._message(remote, Operation.DONE, 0, 0), 0)
        except TimeoutError:
            raise EngineError(f"{where}: not received within {self._deadline_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineError(f"{where}: the connection to the prefill worker failed: {error}") from None
        except CoterieError as error:
            raise EngineError(f"{where}: {error}") from None

    def _message(self, remote: RemoteKv, operation: Operation, start: int, stop: int) -> Message:
        return Message(operation, remote.engine_id, self._kv.kind, remote.request_id, start, stop, remote.blocks)

    async def _copy(self, peer: _Peer, remote: RemoteKv, first: int, blocks: tuple[int, ...]) -> None:
        file, stop = None, first + len(blocks)
        if self._transport != "tcp":
            file = NeighbourFile.open(remote.engine_id, self._kv.kind, self._kv.bytes.shape[1])
        if file is not None:
            with file:
                await self._read_file(file, remote.blocks[first:stop], blocks)
        elif self._transport == "shm":
            raise EngineError("the prefill worker's shared memory cannot be opened here; allow --kv-transport tcp")
        else:
            await self._read_socket(peer, self._message(remote, Operation.READ, first, stop), blocks)

    async def _read_file(self, file: NeighbourFile, theirs: tuple[int, ...], ours: tuple[int, ...]) -> None:
        for number, (block, into) in enumerate(zip(theirs, ours, strict=True), 1):
            file.read(block, self._kv.bytes[into])
            if number % _BLOCKS_AT_ONCE == 0:
                await asyncio.sleep(0)  # other requests of this worker go on

    async def _read_socket(self, peer: _Peer, message: Message, ours: tuple[int, ...]) -> None:
        block_bytes = self._kv.bytes.shape[1]
        await peer.ask(message, len(ours) * block_bytes)
        for block in ours:
            self._kv.bytes[block] = np.frombuffer(await peer.reader.readexactly(block_bytes), np.uint8)


class _Peer:
    """A connection to a holder."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def ask(self, message: Message, payload_bytes: int) -> None:
        """Send a message and read its answer's head; anything but HELD is an error."""
        self._writer.write(message.encode())
        await self._writer.drain()
        status = await read_answer(self.reader, payload_bytes)
        if status is not Status.HELD:
            raise EngineError(status.text)


@asynccontextmanager
async def _connected(remote: RemoteKv) -> AsyncIterator[_Peer]:
    try:
        reader, writer = await asyncio.open_connection(remote.host, remote.port, limit=_BUFFER_BYTES)
    except ValueError as error:  # such as UnicodeError
        raise EngineError(f"this is no name of a host: {error}") from None
    try:
        yield _Peer(reader, writer)
    finally:
        writer.transport.abort()
