"""A client's copy of its slot, in registered memory: pieces of it are written to the slot, others are read from it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable

from coterie.errors import WireError
from coterie.experts.protocol import Dtype, Reply, Request, State, Word
from coterie.experts.protocol.layout import SlotMemory
from coterie.experts.protocol.rules import state_word
from coterie.experts.transport.nixl.agent import Agent, Operation, Region, Transfer
from coterie.experts.transport.nixl.handshake import Invitation

_WORD = struct.Struct("<Q")
_LOADED = Word.OWNER  # where the copy has the state that was read; nobody needs the owner there


class SlotCopy:
    """Nothing here waits: who starts a transfer changes the copy only when it is done.

    Args:
        agent: of the client; the copy must live as long as it.
        invitation: to the slot.

    Raises:
        UnsupportedError: memory cannot be registered.
        EngineError: the server does not have the slot.
        WireError: the invitation is damaged, or its slot larger than memory.
    """

    def __init__(self, agent: Agent, invitation: Invitation) -> None:
        self._agent, self._shape = agent, invitation.shape
        self._memory = _memory(self._shape.size)
        self._slot = SlotMemory(self._shape, memoryview(self._memory))
        self._here, self._there = Region.of(self._memory), Region(invitation.address, self._shape.size)
        agent.register(self._here)
        self._peer = agent.meet(invitation.metadata)
        self._prepared: dict[tuple[Operation, int, int], Transfer] = {}
        there = self._there.part(Word.STATE, _WORD.size)
        self._store = agent.transfer("WRITE", self._peer, [(self._here.part(Word.STATE, _WORD.size), there)])
        self.load = agent.transfer("READ", self._peer, [(self._here.part(_LOADED, _WORD.size), there)])

    def write(self, sequence: int, request: Request) -> Transfer:
        """What brings a request to the slot."""
        self._slot.write_request(sequence, request)
        return self._move("WRITE", request.dtype, len(request.hidden))

    def read(self, dtype: Dtype, tokens: int) -> Transfer:
        """What brings a reply for so many tokens here."""
        return self._move("READ", dtype, tokens)

    def reply(self) -> tuple[int, Reply]:
        """The reply that was read, and the number of its request.

        Raises:
            WireError: a size or the status is out of range.
        """
        return self._slot.read_reply()

    def store(self, state: State, sequence: int) -> Transfer:
        """What gives the slot a state.

        Its owner need not swap: the server makes READY n to DONE n, and changes nothing else.
        """
        _WORD.pack_into(self._memory, Word.STATE, state_word(state, sequence))
        return self._store

    def loaded(self) -> int:
        """The state word that `load` has read."""
        return int(_WORD.unpack_from(self._memory, _LOADED)[0])

    def _move(self, operation: Operation, dtype: Dtype, tokens: int) -> Transfer:
        """Prepared once for each size."""
        most = min(_coarse(tokens), self._shape.tokens)
        key = operation, dtype.numpy.itemsize, most
        if key not in self._prepared:
            pieces = self._shape.request_pieces if operation == "WRITE" else self._shape.reply_pieces
            self._prepared[key] = self.transfer(operation, pieces(most, dtype))
        return self._prepared[key]

    def transfer(self, operation: Operation, pieces: Iterable[tuple[int, int]]) -> Transfer:
        """A transfer of pieces that lie in the same places here and there, as starts and sizes."""
        parts = [(self._here.part(start, size), self._there.part(start, size)) for start, size in pieces]
        return self._agent.transfer(operation, self._peer, parts)


def _memory(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError) as error:
        raise WireError(f"expert server's invitation: to a slot of {size} bytes: {error}") from error


def _coarse(count: int) -> int:
    """At least as many, and at most a fourth more, so that few sizes are prepared."""
    step = 1 << max(count.bit_length() - 3, 0)
    return max(-(-count // step) * step, 1)
