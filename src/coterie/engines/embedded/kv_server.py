"""The holding side of a KV handoff: answers the messages of `messages`, on the worker's event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from coterie.engines.embedded.kv import KvFile
from coterie.engines.embedded.messages import Message, Operation, Status, encode_answer, read_message
from coterie.engines.embedded.request import KeptBlocks
from coterie.errors import ConfigError, WireError

_MOST_AT_ONCE = 256
_log = logging.getLogger("coterie.engine")


class Holder(Protocol):
    """Who holds blocks for other workers: the engine."""

    def handoff(self, request_id: str) -> KeptBlocks | None:
        """The blocks that wait under a request's id."""
        ...

    def release_handoff(self, request_id: str) -> bool:
        """End a lease; whether it was held until now."""
        ...


class KvServer:
    """Hands out leased blocks and ends leases, for 256 connections at once; others wait until one of them ends.

    Attributes:
        port: where it listens, once started.

    Args:
        kv: the cache.
        holder: what is held for whom.
        patience_s: the longest that a peer may take for one message, or for taking in an answer.
    """

    def __init__(self, kv: KvFile, holder: Holder, *, patience_s: float) -> None:
        self.port = 0
        self._kv = kv
        self._holder = holder
        self._patience_s = patience_s
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        try:
            self._server = await asyncio.start_server(self._connected, host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another --kv-port"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._places:  # not for ever: whoever has one gives it up after `patience_s` of silence
                await self._serve(reader, writer)
        except WireError as error:
            _log.warning("a KV connection was closed: %s", error)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the peer is gone or stuck; its lease, if it had one, expires
        except asyncio.CancelledError:
            pass  # the worker stops; a task that ends as cancelled would be logged by asyncio
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(self._patience_s):
                message = await read_message(reader)
            if message is None:
                return
            async with asyncio.timeout(self._patience_s):
                await self._answer(message, writer)

    async def _answer(self, message: Message, writer: asyncio.StreamWriter) -> None:
        status = self._check(message)
        if status is Status.HELD and message.operation is Operation.READ:
            await self._send_blocks(message.blocks[message.start : message.stop], writer)
            return
        if status is Status.HELD and not self._holder.release_handoff(message.request_id):
            status = Status.GONE
        writer.write(encode_answer(status))
        await writer.drain()

    def _check(self, message: Message) -> Status:
        if message.engine_id != self._kv.engine_id:
            return Status.OTHER_ENGINE
        if message.kind != self._kv.kind:
            return Status.OTHER_KIND
        kept = self._holder.handoff(message.request_id)
        if kept is None:
            return Status.GONE
        return Status.HELD if message.blocks == kept.blocks else Status.OTHER_BLOCKS

    async def _send_blocks(self, blocks: tuple[int, ...], writer: asyncio.StreamWriter) -> None:
        """Send blocks as they are now; the DONE that follows tells the peer whether they were its own all along."""
        writer.write(encode_answer(Status.HELD, len(blocks) * self._kv.bytes.shape[1]))
        for block in blocks:
            writer.write(self._kv.bytes[block].tobytes())
            await writer.drain()
