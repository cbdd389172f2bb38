"""The server's end: slots in registered memory, and a thread that looks at them since nothing can wake it."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque

import numpy as np

from coterie.errors import EngineError, UnsupportedError
from coterie.experts.protocol import Word, rules
from coterie.experts.protocol.rules import State
from coterie.experts.transport.inlet import Ready
from coterie.experts.transport.nixl.agent import Agent, Region
from coterie.experts.transport.nixl.handshake import Invitation
from coterie.experts.transport.nixl.pace import Pace
from coterie.experts.transport.shared import SharedServer
from coterie.experts.transport.slots import SlotTable, slot_stride
from coterie.experts.transport.words import Words

REST_S = 5.0
"""How long a slot that a client left is given to nobody: what that client had written may still be on its way."""
LONGEST_S = 0.002
"""The longest sleep between two looks while clients have slots, or slots rest; else the thread sleeps until one has."""

_SKIPPED = 1 << 20  # numbers between two clients of a slot: more than a client posts while one transfer is under way
_NUMBERS = 1 << 48  # of requests in a slot; what was written there may be larger, and leave no room to count on


class NixlServer:
    """One way into an `Intake`.  Clients write to slots and read from them; the server itself sends nothing.

    Args:
        agent: of the server, whose name is the id that clients must name; it is this object's from now on.
        shared: the slots in shared memory, which those of NIXL are like, and at whose doorbell the server sleeps.
        slots: how many clients by NIXL at a time, one or more.

    Raises:
        UnsupportedError: there is too little memory, or it cannot be registered.
    """

    def __init__(self, agent: Agent, shared: SharedServer, slots: int) -> None:
        self._agent, self._ring, self._count = agent, shared.ring, slots
        self._memory = _memory(slots * slot_stride(shared.shape))
        self._slots = SlotTable(Words(self._memory), self._memory, shared.shape, slots)
        self._regions = self._register(slots)
        self._free = deque((place, -REST_S) for place in range(slots))
        self._left_s = -REST_S  # when a client left last
        self._seen = self._slots.words.copy()
        self._problem: BaseException | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="expert-nixl", daemon=True)
        self._thread.start()

    @property
    def clients(self) -> int:
        """See `Inlet`.  Owners' words in the slots say nothing here: clients could write there what they like."""
        return self._count - len(self._free)

    @property
    def waiting(self) -> int:
        """See `Inlet`."""
        return self._slots.waiting

    def claim(self, now_s: float) -> int | None:
        """The place of a slot that is given to a client; None if there is none, or those that are free rest.

        Args:
            now_s: the time, by `time.monotonic`.
        """
        if not self._free or now_s - self._free[0][1] < REST_S:
            return None
        place, _ = self._free.popleft()
        self._wake.set()
        return place

    def invite(self, place: int) -> Invitation:
        """What the client needs to use its slot; its numbers are none that the one before has used, or is about to."""
        sequence = (rules.sequence_of(self._slots[place].load(Word.STATE)) + _SKIPPED) % _NUMBERS
        metadata, address = self._invitations[place], self._regions[place].address
        return Invitation(self._agent.name, metadata, address, sequence, self._slots.shape)

    def release(self, place: int, now_s: float) -> None:
        """Free a slot whose client has gone; what that has written is served as long as the slot rests."""
        slot = self._slots[place]
        rules.withdraw(slot, rules.sequence_of(slot.load(Word.STATE)))
        self._left_s = now_s  # before the slot is free: the looking thread must not take it for one that has rested
        self._free.append((place, now_s))

    def pick_up(self) -> list[Ready]:
        """See `Inlet`.

        Raises:
            EngineError: the looking thread has stopped by itself.
        """
        if self._problem is not None:
            raise EngineError(f"the expert server looks at its slots for NIXL no more: {self._problem!r}")
        return self._slots.pick_up()

    def close(self) -> None:
        """Serve no transfers any more; clients see the end of their connections."""
        self._over.set()
        self._wake.set()
        self._thread.join()
        self._agent.close()

    def _register(self, slots: int) -> list[Region]:
        """Each slot on its own, so that no client has the key to another's."""
        whole, stride = Region.of(self._memory), slot_stride(self._slots.shape)
        regions = [whole.part(place * stride, stride) for place in range(slots)]
        for region in regions:
            self._agent.register(region)
        self._invitations = [self._agent.invitation(place) for place in range(slots)]
        return regions

    # --- in the looking thread ----------------------------------------------------------------------

    def _run(self) -> None:
        pace = Pace(LONGEST_S, time.monotonic())
        try:
            while not self._over.is_set():
                self._sleep_without_clients()
                self._look(pace)
        except BaseException as error:
            self._problem = error
            self._ring()

    def _sleep_without_clients(self) -> None:
        self._wake.clear()  # before the questions, so that who comes after them is not overlooked
        rested = time.monotonic() - self._left_s >= REST_S
        if rested and not self.clients and not self._over.is_set():
            self._wake.wait()

    def _look(self, pace: Pace) -> None:
        """Serve transfers, have the computing thread pick up new requests, and sleep."""
        self._agent.progress()
        words = self._slots.words.copy()
        changed = words[words != self._seen]
        self._seen = words
        if changed.size:
            pace.reset(time.monotonic())
            if (changed & np.uint64(0xFF) == State.READY).any():
                self._ring()
        time.sleep(pace.sleep_s(time.monotonic()))


def _memory(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError) as error:
        raise UnsupportedError(
            f"expert server: {size} bytes for slots by NIXL: {error}; start it with fewer --slots, or --max-tokens"
        ) from error
