"""A server's slots: one after the other in memory that clients write to, each in whole pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from coterie.experts.protocol import Reply, SlotShape, Word, rules
from coterie.experts.protocol.layout import DOORBELL, SlotMemory
from coterie.experts.transport.doorbell import Doorbell
from coterie.experts.transport.inlet import Ready
from coterie.experts.transport.words import Words

_PAGE = 4096
_READY = int(rules.State.READY)  # compared with each slot's at every look


class MappedSlot(SlotMemory):
    """A slot in mapped memory; see `protocol.Slot`."""

    def __init__(self, words: Words, memory: mmap.mmap, shape: SlotShape, offset: int) -> None:
        super().__init__(shape, memoryview(memory)[offset : offset + shape.size])
        self._words, self._offset = words, offset
        self.bell = Doorbell(words, offset + DOORBELL)

    def load(self, word: Word) -> int:
        """See `protocol.Slot`."""
        return self._words.load(self._offset + word)

    def swap(self, word: Word, expected: int, new: int) -> bool:
        """See `protocol.Slot`."""
        return self._words.swap(self._offset + word, expected, new)


class SlotTable:
    """Slots as their server sees them.

    Args:
        words: of the memory.
        memory: in which they lie.
        shape: of each.
        slots: how many.
        start: where the first one begins; a multiple of 8.
    """

    def __init__(self, words: Words, memory: mmap.mmap, shape: SlotShape, slots: int, start: int = 0) -> None:
        self.shape, stride = shape, slot_stride(shape)
        self._slots = list(mapped_slots(words, memory, shape, slots, start))
        # Who rings has changed the word before, and the doorbell is read before the bytes, so that none is overlooked.
        rows = np.frombuffer(memory, np.uint8, slots * stride, start).reshape(slots, stride)
        self._states = rows[:, Word.STATE]  # the lowest byte of each word, to see at once which may be ready
        self.words: npt.NDArray[np.uint64] = rows[:, Word.STATE : Word.STATE + 8].view(np.uint64)[:, 0]

    def __iter__(self) -> Iterator[MappedSlot]:
        return iter(self._slots)

    def __getitem__(self, place: int) -> MappedSlot:
        return self._slots[place]

    @property
    def clients(self) -> int:
        """How many have an owner; may be asked by any thread."""
        return sum(slot.load(Word.OWNER) != rules.NOBODY for slot in self._slots)

    @property
    def waiting(self) -> int:
        """Requests that wait or are computed; may be asked by any thread."""
        return int(self._states.tolist().count(_READY))

    def pick_up(self) -> list[Ready]:
        """Requests that are ready."""
        ready = [slot for slot, state in zip(self._slots, self._states.tolist(), strict=True) if state == _READY]
        found = [(slot, picked) for slot in ready if (picked := rules.pick_up(slot)) is not None]
        return [Ready(request, partial(_answer, slot, sequence)) for slot, (sequence, request) in found]


def mapped_slots(words: Words, memory: mmap.mmap, shape: SlotShape, slots: int, start: int) -> Iterator[MappedSlot]:
    """The slots of a memory, each when it is asked for; the arguments are those of `SlotTable`."""
    return (MappedSlot(words, memory, shape, start + place * slot_stride(shape)) for place in range(slots))


def slot_stride(shape: SlotShape) -> int:
    """Bytes from one slot to the next."""
    return -(-shape.size // _PAGE) * _PAGE


def _answer(slot: MappedSlot, sequence: int, reply: Reply) -> None:
    if rules.answer(slot, sequence, reply):
        slot.bell.ring()
