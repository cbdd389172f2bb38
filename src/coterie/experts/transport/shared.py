"""Expert servers and clients of one host: slots in shared memory, doorbells, no spinning.

0     magic, version, number of slots, server's identity, shape of a slot
64    doorbell of the server
4096  slots, each in whole pages
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from coterie.errors import EngineError, GoneError, InputError, WireError
from coterie.experts.protocol import Reply, Request, SlotShape, rules
from coterie.experts.transport.doorbell import Doorbell
from coterie.experts.transport.identity import is_alive, is_ending, own_identity
from coterie.experts.transport.inlet import Ready
from coterie.experts.transport.pending import FullError, Pending
from coterie.experts.transport.slots import MappedSlot, SlotTable, mapped_slots, slot_stride
from coterie.experts.transport.words import Words
from coterie.shm import SharedFile

PREFIX = "coterie-experts-"
LOOK_S = 0.02
"""How often a waiting client looks whether the server lives."""
SWEEP_S = 0.1
"""How often a server looks whether its clients live."""
_MAGIC, _VERSION = b"coterexp", 2
_HEADER = struct.Struct("<8sIIQIIIII16s")
_BELL, _HEAD = 64, 4096

T = TypeVar("T")


class SharedServer:
    """The server's end, one way into an `Intake`.

    Args:
        shape: of its slots.
        slots: how many, so how many clients at a time.

    Attributes:
        path: its file, which clients open.

    Raises:
        InputError: there is no slot.
        UnsupportedError: there is too little shared memory, or no atomic operations.
    """

    def __init__(self, shape: SlotShape, slots: int) -> None:
        if slots < 1:
            raise InputError(f"expert server: {slots} slots; need one for each client, so one at least")
        self.shape, self._me = shape, own_identity()
        self._file = SharedFile.create(PREFIX, _HEAD + slots * slot_stride(shape))
        self.path = self._file.path
        _HEADER.pack_into(self._file.memory, 0, _MAGIC, _VERSION, slots, self._me, *astuple(shape))
        words = Words(self._file.memory)
        self._bell = Doorbell(words, _BELL)
        self._slots = SlotTable(words, self._file.memory, shape, slots, _HEAD)
        self._swept_s = time.monotonic()

    @property
    def clients(self) -> int:
        """Slots that clients have; may be asked by any thread."""
        return self._slots.clients

    @property
    def waiting(self) -> int:
        """Requests that wait or are computed; may be asked by any thread."""
        return self._slots.waiting

    def ring(self) -> None:
        """Have `wait` look again; may be called by any thread."""
        self._bell.ring()

    def wait(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `look` finds, which is called when clients have rung; None if it found nothing in time, or soon.

        Slots of clients that died are freed before.
        """
        self._sweep()
        return self._bell.wait(look, min(timeout_s, SWEEP_S))

    def pick_up(self) -> list[Ready]:
        """See `Inlet`."""
        return self._slots.pick_up()

    def _sweep(self) -> None:
        if time.monotonic() - self._swept_s >= SWEEP_S:
            for slot in self._slots:
                rules.sweep(slot, self._me, is_alive)
            self._swept_s = time.monotonic()

    def close(self) -> None:
        """Take no new clients; those that wait see it when this process ends."""
        self._file.unlink()


class SharedClient:
    """A client's end: one slot of one server, for one request at a time.

    Args:
        path: the server's file.

    Attributes:
        shape: the most that a request can carry.

    Raises:
        WireError: it is not such a file.
        EngineError: the server is gone; a `FullError`, if all its slots are taken.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._me = path, own_identity()
        memory, self._server, self.shape, slots = _open(path)
        words = Words(memory)
        self._bell = Doorbell(words, _BELL)
        free = (slot for slot in mapped_slots(words, memory, self.shape, slots, _HEAD) if rules.claim(slot, self._me))
        self._slot = next(free, None)
        if self._slot is None:
            raise FullError(f"expert server {path.name}: all {slots} slots are taken; start it with more")

    def post(self, request: Request) -> Pending:
        """Send a request, and do not wait.  What is returned must be waited for or withdrawn before the next one.

        Raises:
            InputError: the request does not fit the slot, or this client is closed.
        """
        slot = self._open_slot()
        sequence = rules.post(slot, request)
        self._bell.ring()
        return _SharedPending(slot, sequence, self._path.name, self._server)

    def call(self, request: Request, timeout_s: float) -> Reply:
        """Send a request and wait for its reply: `post`, then `Pending.wait`."""
        return self.post(request).wait(time.monotonic() + timeout_s)

    def close(self) -> None:
        """Leave the slot to others."""
        rules.release(self._open_slot(), self._me)
        self._slot = None

    def _open_slot(self) -> MappedSlot:
        if self._slot is None:
            raise InputError(f"expert server {self._path.name}: this client is closed")
        return self._slot


class _SharedPending(Pending):
    def __init__(self, slot: MappedSlot, sequence: int, name: str, server: int) -> None:
        super().__init__(name)
        self._slot, self._sequence, self._server = slot, sequence, server

    def look(self, until_s: float) -> Reply | None:
        """See `Pending`."""
        try:
            return self._await(until_s)
        except BaseException:  # a death, a reply that cannot be read, an interrupt
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """See `Pending`."""
        rules.withdraw(self._slot, self._sequence)

    def _await(self, until_s: float) -> Reply | None:
        while True:
            left_s = until_s - time.monotonic()
            reply = self._slot.bell.wait(lambda: rules.take(self._slot, self._sequence), min(left_s, LOOK_S))
            if reply is not None:
                return reply
            if is_ending(self._server):
                raise GoneError(f"expert server {self._name} died")
            if left_s <= LOOK_S:
                return None


def _open(path: Path) -> tuple[mmap.mmap, int, SlotShape, int]:
    """Memory, server, shape and number of slots of a server's file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(f"expert server {path.name} is gone: {error}") from error
    try:
        memory = mmap.mmap(descriptor, 0)
    except ValueError as error:
        raise WireError(f"expert server {path.name}: {error}") from error
    finally:
        os.close(descriptor)
    if len(memory) < _HEAD:
        raise WireError(f"expert server {path.name}: {len(memory)} bytes are no segment")
    magic, version, slots, server, *carries = _HEADER.unpack_from(memory)
    if (magic, version) != (_MAGIC, _VERSION):
        raise WireError(f"expert server {path.name}: {magic!r}, version {version}; need {_MAGIC!r}, version {_VERSION}")
    try:
        shape = SlotShape(*carries)
    except InputError as error:
        raise WireError(f"expert server {path.name}: {error}") from error
    if len(memory) != _HEAD + slots * slot_stride(shape):
        raise WireError(f"expert server {path.name}: {len(memory)} bytes for {slots} slots of {shape.size}")
    return memory, server, shape, slots
