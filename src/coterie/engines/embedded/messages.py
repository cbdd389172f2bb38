"""Messages between the worker that wants a prompt's KV and the worker that holds it.

Over TCP, integers big-endian.  The asking side sends

    "CTKV" | version 1 | operation u8 | engine id 16 bytes | kind 16 bytes
    | start u32 | stop u32 | blocks u32 | bytes of the request id u16 | request id | the number of each block u32

and gets `"CTKV" | version 1 | status u8 | bytes of payload u64 | payload`.  READ answers with the bytes of the blocks
from `start` to before `stop`; DONE ends the lease.  Both name all blocks of the prompt, and the holder answers HELD
only if they are those it holds for that request: so a DONE that is answered HELD also says that whatever was copied
before it, from the socket or from shared memory, was the prompt's KV.  A connection takes any number of messages.
"""

from __future__ import annotations

import asyncio
import re
import struct
from dataclasses import dataclass
from enum import IntEnum

from coterie.engines.embedded.kv import KIND_BYTES
from coterie.errors import WireError

MAX_BLOCKS = 1 << 16
MAX_ID_BYTES = 256
_MAGIC = b"CTKV"
_VERSION = 1
_ASK = struct.Struct(f">4sBB16s{KIND_BYTES}sIIIH")
_ANSWER = struct.Struct(">4sBBQ")
_ENGINE_ID = re.compile(r"[0-9a-f]{32}")


class Operation(IntEnum):
    """What is asked for."""

    READ = 1
    DONE = 2


class Status(IntEnum):
    """How a message was answered."""

    HELD = 0
    GONE = 1
    OTHER_ENGINE = 2
    OTHER_KIND = 3
    OTHER_BLOCKS = 4

    @property
    def text(self) -> str:
        """For people."""
        return _TEXTS[self]


_TEXTS = {
    Status.HELD: "held",
    Status.GONE: "the prefill worker no longer holds the KV: it was released, or its lease has expired",
    Status.OTHER_ENGINE: "the prefill worker was started anew since",
    Status.OTHER_KIND: "the prefill worker runs another model or another block size",
    Status.OTHER_BLOCKS: "the blocks are not those that the prefill worker holds for the request",
}


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """Where a prompt's KV waits.

    Attributes:
        host: of the holder's message socket.
        port: of it.
        engine_id: the holder, 32 hexadecimal digits.
        request_id: whose KV it is, by the holder's name.
        blocks: the holder's blocks, in order of the prompt.
        tokens: of the prompt.
    """

    host: str
    port: int
    engine_id: str
    request_id: str
    blocks: tuple[int, ...]
    tokens: int

    def __post_init__(self) -> None:
        if not _ENGINE_ID.fullmatch(self.engine_id):
            raise WireError(f"remote_engine_id: not 32 hexadecimal digits: {self.engine_id[:40]!r}")
        if not 0 < len(self.request_id.encode("utf-8", "surrogatepass")) <= MAX_ID_BYTES:
            raise WireError(f"remote_request_id: must have 1 to {MAX_ID_BYTES} bytes")
        if len(self.blocks) > MAX_BLOCKS or not all(0 <= block < 1 << 32 for block in self.blocks):
            raise WireError(f"remote_block_ids: must be at most {MAX_BLOCKS} block numbers")


@dataclass(frozen=True, slots=True)
class Message:
    """A question about the KV of one request; see the module's docstring."""

    operation: Operation
    engine_id: str
    kind: bytes
    request_id: str
    start: int
    stop: int
    blocks: tuple[int, ...]

    def encode(self) -> bytes:
        """As it travels."""
        name = self.request_id.encode("utf-8", "surrogatepass")
        engine = bytes.fromhex(self.engine_id)
        sizes = (self.start, self.stop, len(self.blocks), len(name))
        head = _ASK.pack(_MAGIC, _VERSION, self.operation, engine, self.kind, *sizes)
        return head + name + struct.pack(f">{len(self.blocks)}I", *self.blocks)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """Read a message; None at the end of the connection.

    Raises:
        WireError: it does not follow the format.
        asyncio.IncompleteReadError: the connection ended within it.
    """
    begin = await reader.read(1)
    if not begin:
        return None
    head = begin + await reader.readexactly(_ASK.size - 1)
    magic, version, operation, engine, kind, start, stop, count, name_bytes = _ASK.unpack(head)
    if (magic, version) != (_MAGIC, _VERSION) or operation not in tuple(Operation):
        raise WireError(f"KV message: not one of version {_VERSION}")
    if not start <= stop <= count <= MAX_BLOCKS or not 0 < name_bytes <= MAX_ID_BYTES:
        raise WireError(f"KV message: blocks {start} to {stop} of {count}, an id of {name_bytes} bytes: out of range")
    name = await reader.readexactly(name_bytes)
    blocks = struct.unpack(f">{count}I", await reader.readexactly(4 * count))
    text = name.decode("utf-8", "replace")
    return Message(Operation(operation), engine.hex(), kind, text, start, stop, blocks)


def encode_answer(status: Status, payload_bytes: int = 0) -> bytes:
    """The answer's head; its payload follows."""
    return _ANSWER.pack(_MAGIC, _VERSION, status, payload_bytes)


async def read_answer(reader: asyncio.StreamReader, payload_bytes: int) -> Status:
    """Read an answer's head; where it is HELD, `payload_bytes` of payload follow.

    Raises:
        WireError: it does not follow the format, or announces another size.
        asyncio.IncompleteReadError: the connection ended within it.
    """
    magic, version, status, size = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    if (magic, version) != (_MAGIC, _VERSION) or status not in tuple(Status):
        raise WireError(f"KV answer: not one of version {_VERSION}")
    if size != (payload_bytes if status == Status.HELD else 0):
        raise WireError(f"KV answer: {size} bytes announced instead of {payload_bytes}")
    return Status(status)
