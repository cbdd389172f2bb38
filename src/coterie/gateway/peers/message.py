"""What a gateway tells those of other hosts: all that its requests hold and use, in one message that needs no other.

Workers are known by 64 bits of a hash of their URL (`key_of`), as they are to the processes of one host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from coterie.core import MAX_EXPERTS, MAX_LAYERS
from coterie.counting import Sums
from coterie.decoding import reading
from coterie.errors import InputError, WireError
from coterie.routing import Load
from coterie.routing.marginal_batches import LEAST_IN_ROW
from coterie.routing.shared_batches import Shape
from coterie.routing.shared_load import MOST_REQUESTS, MOST_TOKENS, MOST_WORKERS

VERSION = 1
"""Of messages; gateways of different ones tell each other nothing."""

MEDIA = "application/msgpack"
MAX_MESSAGE_BYTES = 32 << 20
"""256 workers of a model of 58 x 256 experts, with room."""

_Key = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$", description="Hash of the worker's URL.")]
_Requests = Annotated[int, msgspec.Meta(ge=0, le=MOST_REQUESTS)]
Identity = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", description="Of a gateway, from start to end.")]

Batches = Mapping[int, tuple[int, Sums]]
"""Requests and the sum of their rows, by the key of their worker."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway holds of one worker."""

    worker: _Key
    requests: _Requests
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class Used(msgspec.Struct, frozen=True, array_like=True):
    """What its requests use at one decode worker.

    Attributes:
        worker: its key.
        requests: how many of them are counted.
        sums: minus the sum of their rows (`counting.Row`), `[L * E]`, little-endian words of 4 or 8 bytes.
    """

    worker: _Key
    requests: _Requests
    sums: bytes


class Use(msgspec.Struct, frozen=True):
    """What its requests use; workers without any are left out."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    experts: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)]
    workers: Annotated[tuple[Used, ...], msgspec.Meta(max_length=MOST_WORKERS)]


class Message(msgspec.Struct, frozen=True):
    """What a gateway holds; it takes the place of all that it said before."""

    version: int
    identity: Identity
    sequence: Annotated[int, msgspec.Meta(ge=1, le=1 << 53, description="Greater than that of any message before.")]
    prefill: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MOST_WORKERS)]
    decode: Annotated[tuple[Held, ...], msgspec.Meta(max_length=MOST_WORKERS)]
    use: Use | None
    leaving: Annotated[bool, msgspec.Meta(description="It ends, and nothing that it said counts any more.")] = False


class Taken(msgspec.Struct, frozen=True):
    """The answer to a message."""

    identity: Identity
    counts: Annotated[bool, msgspec.Meta(description="Not if a later one came before, or it is the gateway's own.")]


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What a gateway holds, by keys of workers.

    Attributes:
        prefill: load of prefill workers, those that hold nothing included.
        decode: load of decode workers, likewise.
        shape: of the model; None before any request told it.
        batches: what requests use at decode workers.
    """

    prefill: Mapping[int, Load]
    decode: Mapping[int, Load]
    shape: Shape | None
    batches: Batches


def message_of(figures: Figures, identity: str, sequence: int, *, leaving: bool = False) -> Message:
    """The message that says this."""
    use = None
    if figures.shape is not None:
        used = tuple(Used(_hex(key), requests, _words(sums)) for key, (requests, sums) in figures.batches.items())
        use = Use(*figures.shape, used)
    return Message(VERSION, identity, sequence, _held(figures.prefill), _held(figures.decode), use, leaving)


def write_message(message: Message) -> bytes:
    """Its bytes, of media type `MEDIA`."""
    return msgspec.msgpack.encode(message)


def read_message(body: bytes) -> Message:
    """A message from its bytes; what it says is not yet checked, see `figures_of`.

    Raises:
        WireError: they are none, or of another version.
    """
    with reading("the body"):
        version = msgspec.msgpack.decode(body, type=_Versioned).version
        if version != VERSION:
            raise WireError(
                f"version: the peer speaks {version}, this gateway {VERSION}; run the same version of coterie on both"
            )
        return msgspec.msgpack.decode(body, type=Message)


def figures_of(message: Message) -> Figures:
    """What a message says.

    Raises:
        InputError: a worker is named twice, or sums are not those of so many requests.
    """
    use = message.use
    batches: dict[int, tuple[int, Sums]] = {}
    shape = None
    if use is not None:
        shape = (use.layers, use.experts)
        if 4 * use.layers * use.experts * len(message.decode) > MAX_MESSAGE_BYTES:
            raise InputError(
                f"use: {len(message.decode)} workers of {use.layers} x {use.experts} experts are more than a message "
                f"of {MAX_MESSAGE_BYTES} bytes could say"
            )
        for used in use.workers:
            batches[int(used.worker, 16)] = used.requests, _sums(used, shape)
        if len(batches) < len(use.workers):
            raise InputError("use.workers: a worker is named twice")
    decode = _loads("decode", message.decode)
    if not batches.keys() <= decode.keys():
        raise InputError("use.workers: a worker that is not in decode")
    return Figures(_loads("prefill", message.prefill), decode, shape, batches)


class _Versioned(msgspec.Struct):
    version: int


def _hex(key: int) -> str:
    return f"{key:016x}"


def _held(loads: Mapping[int, Load]) -> tuple[Held, ...]:
    return tuple(Held(_hex(key), load.requests, min(load.tokens, MOST_TOKENS)) for key, load in loads.items())


def _loads(name: str, held: Sequence[Held]) -> dict[int, Load]:
    loads = {int(one.worker, 16): Load(one.requests, one.tokens) for one in held}
    if len(loads) < len(held):
        raise InputError(f"{name}: a worker is named twice")
    return loads


def _words(sums: Sums) -> bytes:
    positive = np.negative(sums)
    return positive.astype("<u4" if positive.max() < 1 << 32 else "<i8").tobytes()


def _sums(used: Used, shape: Shape) -> Sums:
    pairs = shape[0] * shape[1]
    if len(used.sums) not in (4 * pairs, 8 * pairs):
        raise InputError(
            f"use: {len(used.sums)} bytes of sums for worker {used.worker}; {shape[0]} x {shape[1]} experts have "
            f"{4 * pairs} or {8 * pairs}"
        )
    sums: Sums = np.frombuffer(used.sums, "<u4" if len(used.sums) == 4 * pairs else "<i8").astype(np.int64)
    least, most = int(sums.min()), int(sums.max())
    if least < 0 or most > -LEAST_IN_ROW * used.requests:
        raise InputError(
            f"use: {used.requests} requests at worker {used.worker} cannot have sums from {least} to {most}"
        )
    return np.negative(sums, out=sums)
