"""What client and server send each other over a byte stream; all numbers little-endian.

Each side begins with one line of 64 bytes, the hello.  Then the client sends requests and withdrawals, the server
replies.  A request is a line, then expert ids [T, K], router weights [T, K], hidden states [T, H]; a withdrawal is a
line; a reply is a line, then weighted sums [T, H].

A line is not trusted: its sizes are checked against the slot's shape before anything is made for what follows.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError, WireError
from coterie.experts.protocol.layout import LINE, Dtype, Reply, Request, SlotShape, Status, dtype_of, status_of

Bytes: TypeAlias = bytes | memoryview

_MAGIC, _VERSION = b"coterexp", 2
_CALL = struct.Struct("<8sI16s36x")  # magic, version, token of the server that is meant
_ANSWER = struct.Struct("<8sIIIIIIII16s8x")  # magic, version, welcome, slots, shape
_REQUEST = struct.Struct("<QQQIIIIII16x")  # sequence, epoch, owner, layer, tokens, hidden, top_k, dtype, kind
_REPLY = struct.Struct("<QQIIII32x")  # sequence, epoch, status, tokens, hidden, dtype
assert _CALL.size == _ANSWER.size == _REQUEST.size == _REPLY.size == LINE

TOKEN_BYTES = 16
"""Of the random token by which a server is told from all others, earlier ones at the same port among them."""
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class _Kind(IntEnum):
    REQUEST = 1
    WITHDRAWAL = 2


class Welcome(IntEnum):
    """What a server says to a hello."""

    IN = 0
    FULL = 1  # all slots are taken
    STRANGER = 2  # another server is meant


@dataclass(frozen=True, slots=True)
class Head:
    """The line of a request.

    Attributes:
        sequence: its number.
        epoch: membership epoch of the client's routing table.
        owner: who asks.
        layer: MoE layer.
        tokens: T.
        hidden: H.
        top_k: K.
        dtype: of the hidden states.
    """

    sequence: int
    epoch: int
    owner: int
    layer: int
    tokens: int
    hidden: int
    top_k: int
    dtype: Dtype

    @property
    def size(self) -> int:
        """Bytes that follow."""
        return self.tokens * (8 * self.top_k + self.dtype.numpy.itemsize * self.hidden)


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """The line that says that a request is no longer wanted."""

    sequence: int


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The line of a reply; see `Reply`."""

    sequence: int
    epoch: int
    status: Status
    tokens: int
    hidden: int
    dtype: Dtype

    @property
    def size(self) -> int:
        """Bytes that follow."""
        return self.tokens * self.hidden * self.dtype.numpy.itemsize

    def reply(self, body: npt.NDArray[np.uint8]) -> Reply:
        """The reply, whose sums are these bytes."""
        sums = body.view(self.dtype.numpy).reshape(self.tokens, self.hidden)
        return Reply(self.epoch, self.status, sums, self.dtype)


def write_call(server: bytes) -> bytes:
    """A client's hello.

    Args:
        server: token of the server that is meant.
    """
    return _CALL.pack(_MAGIC, _VERSION, server)


def read_call(line: Bytes) -> bytes:
    """The token in a client's hello.

    Raises:
        WireError: it is none.
    """
    magic, version, server = _CALL.unpack(line)
    _check_magic(magic, version)
    return bytes(server)


def write_answer(welcome: Welcome, shape: SlotShape, slots: int) -> bytes:
    """A server's hello: whether the client has a slot now, how many there are, and what they carry."""
    return _ANSWER.pack(_MAGIC, _VERSION, welcome, slots, *astuple(shape))


def read_answer(line: Bytes) -> tuple[Welcome, SlotShape, int]:
    """What `write_answer` was given.

    Raises:
        WireError: it is no server's hello.
    """
    magic, version, welcome, slots, *shape = _ANSWER.unpack(line)
    _check_magic(magic, version)
    try:
        return Welcome(welcome), SlotShape(*shape), slots
    except (ValueError, InputError) as error:
        raise WireError(f"expert server's hello: {error}") from error


def write_request(shape: SlotShape, sequence: int, request: Request) -> list[Bytes]:
    """A request as pieces to be sent, which are the memory of its arrays.

    Raises:
        InputError: it does not fit the slot, its arrays do not fit each other, or an expert is out of range.
    """
    sizes = shape.check_request(request)
    line = sequence, request.epoch, request.owner, request.layer, *sizes, request.dtype, _Kind.REQUEST
    return [_REQUEST.pack(*line), *map(_bytes, (request.ids, request.weights, request.hidden))]


def write_withdrawal(sequence: int) -> bytes:
    """The line that says that a request is no longer wanted."""
    return _REQUEST.pack(sequence, 0, 0, 0, 0, 0, 0, 0, _Kind.WITHDRAWAL)


def read_head(shape: SlotShape, line: Bytes) -> Head | Withdrawal:
    """What a client's line says.

    Raises:
        WireError: a size, the layer, the dtype or the kind of line is out of range.
    """
    sequence, epoch, owner, layer, tokens, hidden, top_k, code, kind = _REQUEST.unpack(line)
    if kind == _Kind.WITHDRAWAL:
        return Withdrawal(sequence)
    if kind != _Kind.REQUEST:
        raise WireError(f"expert request: line of unknown kind {kind}")
    if problem := shape.problem(tokens, hidden, top_k, layer):
        raise WireError(f"expert request: {problem}")
    return Head(sequence, epoch, owner, layer, tokens, hidden, top_k, dtype_of(code))


def read_request(shape: SlotShape, head: Head, body: npt.NDArray[np.uint8]) -> Request:
    """The request of a line and the bytes that follow it, whose memory its arrays are.

    Raises:
        WireError: an expert is out of range.
    """
    rows, wide = (head.tokens, head.top_k), 4 * head.tokens * head.top_k
    ids = body[:wide].view(_INT32).reshape(rows)
    if problem := shape.strangers(ids):
        raise WireError(f"expert request: {problem}")
    weights = body[wide : 2 * wide].view(_FLOAT32).reshape(rows)
    hidden = body[2 * wide :].view(head.dtype.numpy).reshape(head.tokens, head.hidden)
    return Request(head.layer, head.epoch, head.owner, hidden, ids, weights, head.dtype)


def write_reply(shape: SlotShape, sequence: int, reply: Reply) -> list[Bytes]:
    """A reply as pieces to be sent, which are the memory of its sums.

    Raises:
        InputError: it does not fit the slot.
    """
    line = sequence, reply.epoch, reply.status, *shape.check_reply(reply), reply.dtype
    return [_REPLY.pack(*line), _bytes(reply.sums)]


def read_reply_head(shape: SlotShape, line: Bytes) -> ReplyHead:
    """The line of a reply.

    Raises:
        WireError: a size, the status or the dtype is out of range.
    """
    sequence, epoch, status, tokens, hidden, code = _REPLY.unpack(line)
    if problem := shape.problem(tokens, hidden):
        raise WireError(f"expert reply: {problem}")
    return ReplyHead(sequence, epoch, status_of(status), tokens, hidden, dtype_of(code))


def _check_magic(magic: bytes, version: int) -> None:
    if (magic, version) != (_MAGIC, _VERSION):
        raise WireError(f"expert hello: {magic!r}, version {version}; need {_MAGIC!r}, version {_VERSION}")


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
