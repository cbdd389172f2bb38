"""Where the parts of a slot lie in memory; all numbers little-endian, all parts aligned to cache lines.

    0     state word   64 bits: state (lowest byte), sequence number     changed by compare-and-swap only,
    8     owner word   64 bits: identity of the owner, or 0              by `rules`
    16    doorbell of the owner: 32 bits rung, 32 bits sleepers
    64    request header
    128   reply header
    192   request: hidden states [T, H], expert ids [T, K], router weights [T, K]
    ...   reply: weighted sums [T, H]

Headers are not trusted: sizes are checked against the slot's before anything else is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.core import MAX_EXPERTS, MAX_LAYERS
from coterie.errors import InputError, WireError

LINE = 64
DOORBELL = 16
_REQUEST_HEADER, _REPLY_HEADER, _PAYLOAD = LINE, 2 * LINE, 3 * LINE
_REQUEST = struct.Struct("<QQQIIIII")  # sequence, epoch, owner, layer, tokens, hidden, top_k, dtype
_REPLY = struct.Struct("<QQIIII")  # sequence, epoch, status, tokens, hidden, dtype
_MOST = 1 << 24  # tokens or hidden size of a slot; keeps all sizes far below 64 bits


class Dtype(IntEnum):
    """Number format of hidden states or sums; 16-bit brain floats are carried as their bits."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2

    @property
    def numpy(self) -> np.dtype[Any]:
        """What an array of it is in numpy."""
        return _NUMPY[self]


_NUMPY = (np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2"))


class Status(IntEnum):
    """What became of a request."""

    COMPUTED = 0
    STALE = 1  # the server's experts changed; read the routing table anew
    ABSENT = 2  # the server does not hold one of the experts
    MALFORMED = 3  # the request breaks the protocol; to send it again is of no use


_DTYPES, _STATUSES = tuple(Dtype), tuple(Status)  # by their codes, of which none is negative on the wire


class Request(msgspec.Struct, frozen=True, eq=False):
    """Tokens of one layer, for the experts of one server.

    Attributes:
        layer: MoE layer, from 0.
        epoch: membership epoch of the client's routing table.
        owner: who asks.
        hidden: `[T, H]` hidden states.
        ids: `[T, K]` int32 experts of each token; -1 where another server has the expert.
        weights: `[T, K]` float32 router weights.
        dtype: of `hidden`, and of the sums wanted.
    """

    layer: int
    epoch: int
    owner: int
    hidden: npt.NDArray[Any]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    dtype: Dtype = Dtype.FLOAT32


class Reply(msgspec.Struct, frozen=True, eq=False):
    """What the server made of a request.

    Attributes:
        epoch: since when the server has the experts that it has; 0 if the request was malformed.
        status: whether it computed.
        sums: `[T, H]`: for each token, the sum of its experts' outputs on this server, times their weights; `[0, H]` if
            it did not compute.
        dtype: of `sums`.
    """

    epoch: int
    status: Status
    sums: npt.NDArray[Any]
    dtype: Dtype = Dtype.FLOAT32


@dataclass(frozen=True, slots=True)
class SlotShape:
    """The most that one slot can carry, and for which model's experts.

    Attributes:
        tokens: most tokens T of a request.
        hidden: size H of a hidden state.
        top_k: most experts K of a token.
        layers: MoE layers of the model.
        experts: experts of each layer.
        fingerprint: 16 bytes that the model's experts are known by; zeros if nobody compares them.

    Raises:
        InputError: a value is out of range.
    """

    tokens: int
    hidden: int
    top_k: int
    layers: int
    experts: int
    fingerprint: bytes = bytes(16)

    def __post_init__(self) -> None:
        most = {"tokens": _MOST, "hidden": _MOST, "top_k": self.experts, "layers": MAX_LAYERS, "experts": MAX_EXPERTS}
        for name, limit in most.items():
            if not 1 <= (value := getattr(self, name)) <= limit:
                raise InputError(f"slot shape: {name} must be from 1 to {limit}, got {value}")

    @property
    def size(self) -> int:
        """Bytes of a slot."""
        return self._parts[-1]

    @property
    def _parts(self) -> tuple[int, ...]:
        """Where hidden states, ids, weights and sums begin, and the slot ends."""
        return _parts(self.tokens, self.hidden, self.top_k)

    def request_pieces(self, tokens: int, dtype: Dtype) -> list[tuple[int, int]]:
        """Where a request of so many tokens lies in a slot, be K what it may: start and size of each piece."""
        states, ids, weights, _, _ = self._parts
        pairs = 4 * tokens * self.top_k
        rows = tokens * self.hidden * dtype.numpy.itemsize
        return [(_REQUEST_HEADER, LINE), (states, rows), (ids, pairs), (weights, pairs)]

    def reply_pieces(self, tokens: int, dtype: Dtype) -> list[tuple[int, int]]:
        """Likewise for a reply."""
        return [(_REPLY_HEADER, LINE), (self._parts[3], tokens * self.hidden * dtype.numpy.itemsize)]

    def check_request(self, request: Request) -> tuple[int, int, int]:
        """Sizes T, H and K of a request.

        Raises:
            InputError: it does not fit the slot, its arrays do not fit each other, or an expert is out of range.
        """
        tokens, hidden = _rows("request", request.hidden, request.dtype)
        top_k = _columns(tokens, request.ids, request.weights)
        if problem := self.problem(tokens, hidden, top_k, request.layer) or self.strangers(request.ids):
            raise InputError(f"request: {problem}")
        return tokens, hidden, top_k

    def check_reply(self, reply: Reply) -> tuple[int, int]:
        """Sizes T and H of a reply.

        Raises:
            InputError: it does not fit the slot.
        """
        tokens, hidden = _rows("reply", reply.sums, reply.dtype)
        if problem := self.problem(tokens, hidden):
            raise InputError(f"reply: {problem}")
        return tokens, hidden

    def problem(self, tokens: int, hidden: int, top_k: int = 1, layer: int = 0) -> str | None:
        """Why these sizes do not fit the slot."""
        if tokens > self.tokens or hidden != self.hidden or not 1 <= top_k <= self.top_k:
            return (
                f"{tokens} tokens of size {hidden}, top-{top_k}; "
                f"the slot holds {self.tokens} of size {self.hidden}, top-{self.top_k}"
            )
        return None if 0 <= layer < self.layers else f"layer {layer} of {self.layers}"

    def strangers(self, ids: npt.NDArray[np.int32]) -> str | None:
        """Which experts the model does not have."""
        least, most = least_and_most(ids)
        return None if least >= -1 and most < self.experts else f"experts {least} to {most} of {self.experts}"


_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_FEW = 32  # numbers that are compared faster one by one


def least_and_most(ids: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
    """The least id and the largest; -1, which asks for nothing, where there are none."""
    if ids.size > _FEW:
        return int(ids.min()), int(ids.max())
    few = ids.ravel().tolist()
    return min(few, default=-1), max(few, default=-1)


@cache  # asked for at every request
def _parts(tokens: int, hidden: int, top_k: int) -> tuple[int, ...]:
    states, choices = 4 * tokens * hidden, 4 * tokens * top_k
    return tuple(accumulate(map(_lines, (states, choices, choices, states)), initial=_PAYLOAD))


def _lines(size: int) -> int:
    """Bytes of whole cache lines that hold as many."""
    return -(-size // LINE) * LINE


class SlotMemory:
    """What is written to a slot's memory, and read from it; its arrays are made once, and not for each request.

    Args:
        shape: of the slot.
        memory: `shape.size` bytes.
    """

    def __init__(self, shape: SlotShape, memory: memoryview) -> None:
        states, ids, weights, sums, _ = shape._parts
        pairs = shape.tokens * shape.top_k
        self._shape, self._memory = shape, memory
        self._states, self._sums = (_by_dtype(memory, start, shape) for start in (states, sums))
        self._ids = np.frombuffer(memory, _INT32, pairs, ids)
        self._weights = np.frombuffer(memory, _FLOAT32, pairs, weights)

    def write_request(self, sequence: int, request: Request) -> None:
        """Write a request and its header.

        Args:
            sequence: its number.
            request: what to write.

        Raises:
            InputError: it does not fit the slot, its arrays do not fit each other, or an expert is out of range.
        """
        tokens, hidden, top_k = self._shape.check_request(request)
        pairs = tokens * top_k
        header = (sequence, request.epoch, request.owner, request.layer, tokens, hidden, top_k, request.dtype)
        _REQUEST.pack_into(self._memory, _REQUEST_HEADER, *header)
        self._states[request.dtype][:tokens] = request.hidden
        self._ids[:pairs] = request.ids.reshape(-1)
        self._weights[:pairs] = request.weights.reshape(-1)

    def read_request(self) -> tuple[int, Request]:
        """Sequence number and a copy of the request.

        Raises:
            WireError: a size, the layer or an expert is out of range.
        """
        sequence, epoch, owner, layer, tokens, hidden, top_k, code = _REQUEST.unpack_from(self._memory, _REQUEST_HEADER)
        dtype, pairs = dtype_of(code), tokens * top_k
        if problem := self._shape.problem(tokens, hidden, top_k, layer):
            raise WireError(f"expert request: {problem}")
        ids = self._ids[:pairs].reshape(tokens, top_k).copy()
        if problem := self._shape.strangers(ids):
            raise WireError(f"expert request: {problem}")
        states, weights = self._states[dtype][:tokens].copy(), self._weights[:pairs].reshape(tokens, top_k).copy()
        return sequence, Request(layer, epoch, owner, states, ids, weights, dtype)

    def write_reply(self, sequence: int, reply: Reply) -> None:
        """Write a reply and its header.

        Raises:
            InputError: it does not fit the slot.
        """
        tokens, hidden = self._shape.check_reply(reply)
        header = (sequence, reply.epoch, reply.status, tokens, hidden, reply.dtype)
        _REPLY.pack_into(self._memory, _REPLY_HEADER, *header)
        self._sums[reply.dtype][:tokens] = reply.sums

    def read_reply(self) -> tuple[int, Reply]:
        """Sequence number of the request, and a copy of the reply.

        Raises:
            WireError: a size or the status is out of range.
        """
        sequence, epoch, status, tokens, hidden, code = _REPLY.unpack_from(self._memory, _REPLY_HEADER)
        dtype = dtype_of(code)
        if problem := self._shape.problem(tokens, hidden):
            raise WireError(f"expert reply: {problem}")
        return sequence, Reply(epoch, status_of(status), self._sums[dtype][:tokens].copy(), dtype)


def _by_dtype(memory: memoryview, start: int, shape: SlotShape) -> tuple[npt.NDArray[Any], ...]:
    """The same memory as `[T, H]` values of each dtype."""
    size = shape.tokens * shape.hidden
    return tuple(np.frombuffer(memory, dtype, size, start).reshape(shape.tokens, shape.hidden) for dtype in _NUMPY)


def _rows(what: str, array: npt.NDArray[Any], dtype: Dtype) -> tuple[int, int]:
    if array.ndim != 2 or array.dtype != dtype.numpy:
        raise InputError(f"{what}: array {array.shape} of {array.dtype}; need [T, H] of {dtype.numpy}")
    return array.shape[0], array.shape[1]


def _columns(tokens: int, ids: npt.NDArray[Any], weights: npt.NDArray[Any]) -> int:
    if ids.ndim != 2 or ids.shape != weights.shape or len(ids) != tokens:
        raise InputError(f"request: ids {ids.shape} and weights {weights.shape} for {tokens} tokens")
    if ids.dtype != _INT32 or weights.dtype != _FLOAT32:
        raise InputError(f"request: ids of {ids.dtype} and weights of {weights.dtype}; need {_INT32} and {_FLOAT32}")
    top_k: int = ids.shape[1]
    return top_k


def dtype_of(code: int) -> Dtype:
    """The number format of a code.

    Raises:
        WireError: there is none.
    """
    try:
        return _DTYPES[code]
    except IndexError as error:
        raise WireError(f"expert slot: unknown dtype {code}") from error


def status_of(code: int) -> Status:
    """The status of a code.

    Raises:
        WireError: there is none.
    """
    try:
        return _STATUSES[code]
    except IndexError as error:
        raise WireError(f"expert reply: unknown status {code}") from error
