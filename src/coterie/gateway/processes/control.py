"""What the processes of one gateway tell each other: frames of msgpack over a pair of connected sockets.

The first process has one such pair with each of the others.  It sends one `Setup`, then any number of `Ask`; the other
sends an `Answer` to each, and a `Ready` once.  When either end is closed, its process is gone.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeVar, Union

import msgspec

from coterie.errors import WireError
from coterie.gateway.config import Source

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What a process is to do.

    Attributes:
        process: its number, from 0; also its row of the board.
        rows: of the board.
        board: path of the board's memory.
        config: the gateway's configuration.
        urls: of all workers that there ever were, by name.
        drained: names of those that are sent nothing.
        source: where it comes from, to be read again.
    """

    process: int
    rows: int
    board: str
    config: dict[str, Any]
    urls: dict[str, str]
    drained: tuple[str, ...]
    source: Source


class Ready(msgspec.Struct, frozen=True, tag=True):
    """It serves, or it cannot.

    Attributes:
        problem: why not; None if it serves.
        lines: what it has to say of itself.
    """

    problem: str | None = None
    lines: tuple[str, ...] = ()


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request to the admin side.

    Attributes:
        number: of the request; its answer has the same.
        method: of HTTP.
        target: path and query.
        headers: names and values.
        body: of the request.
    """

    number: int
    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The admin side's reply.

    Attributes:
        number: of the request.
        status: of HTTP.
        headers: names and values.
        body: of the reply.
    """

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def receive(reader: asyncio.StreamReader, *kinds: type[T]) -> T:
    """The next frame, of one of these kinds.

    Raises:
        EOFError: the other process is gone.
        WireError: it sent something else.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise WireError(f"control: a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
        return _read(await reader.readexactly(length), kinds)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    except msgspec.MsgspecError as error:
        raise WireError(f"control: not a frame of this kind: {error}") from None


def _read(frame: bytes, kinds: tuple[type[T], ...]) -> T:
    kind: Any = Union[kinds]  # noqa: UP007 - as many as there are
    found: T = msgspec.msgpack.decode(frame, type=kind)
    return found


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Send a frame; one to a process that is gone is lost."""
    frame = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(frame)) + frame)
