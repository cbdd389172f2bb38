"""The only code that changes a slot: what client, server and sweeper do, one shared step after the other.

A slot belongs to a server and is used by one client at a time.

                     claim                      post
    nobody's, FREE n ─────▶ a client's, FREE n ─────▶ READY n+1 ──answer──▶ DONE n+1
           ▲                   │    ▲   ▲               │                     │
           └──────release──────┘    │   └───withdraw────┘                     │
                                    └──────────────take, or withdraw──────────┘

The state word holds the state and the sequence number n of the slot's last request, which outlives owners.  So whoever
swaps it says which request is meant, and what comes too late fails: an answer to a request that was withdrawn, whoever
asked it.  Request and reply lie apart, so that writing a late answer harms no later request.

The functions run on real slots and, one step at a time and cut off anywhere, in `tests/experts/explorer.py`.

What must hold outside of them:

- One thread of one process serves a slot.
- `alive` errs on one side only: who is dead is dead for ever, and no identity is used twice.  A time-out is no proof of
  death: a process that was but suspended goes on to write.
- Clients follow these rules.  One that does not harms none but itself while it writes to its own request and state word
  only, whatever it writes, and counts no number back: server and sweeper take both for any bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from coterie.errors import WireError

NOBODY = 0
"""Owner of a slot that is not in use."""


class State(IntEnum):
    """The lowest byte of the state word."""

    FREE = 0  # the owner may write a request
    READY = 1  # the server may read it and write a reply
    DONE = 2  # the owner may read the reply


_STATES = {int(state): state for state in State}  # a look into it costs less than State(number)


class Word(IntEnum):
    """The 64-bit words of a slot that are only changed by compare-and-swap, and where they lie in it."""

    STATE = 0
    OWNER = 8


RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")


class Slot(Protocol[RequestT, ReplyT]):
    """A slot's shared memory.

    Every call is a step that other processes see before or after theirs: sequential consistency.
    """

    def load(self, word: Word) -> int:
        """The value of a word."""
        ...

    def swap(self, word: Word, expected: int, new: int) -> bool:
        """Compare and swap: give the word a new value if it has the expected one; whether it had."""
        ...

    def write_request(self, sequence: int, request: RequestT) -> None:
        """Write a request and its sequence number; not atomic."""
        ...

    def read_request(self) -> tuple[int, RequestT]:
        """A copy of sequence number and request; a mixture of two, where another is written meanwhile."""
        ...

    def write_reply(self, sequence: int, reply: ReplyT) -> None:
        """Write a reply and the sequence number of its request; not atomic."""
        ...

    def read_reply(self) -> tuple[int, ReplyT]:
        """A copy of sequence number and reply."""
        ...


def state_word(state: State, sequence: int) -> int:
    """Value of a state word."""
    return sequence << 8 | state


def state_of(word: int) -> State | None:
    """State in a state word; None if a client wrote none there."""
    return _STATES.get(word & 0xFF)


def sequence_of(word: int) -> int:
    """Sequence number in a state word."""
    return word >> 8


def claim(slot: Slot[Any, Any], client: int) -> bool:
    """Client: take a slot that nobody uses; whether it is the client's now."""
    return slot.swap(Word.OWNER, NOBODY, client)


def post(slot: Slot[RequestT, Any], request: RequestT) -> int:
    """Owner: hand a request to the server.

    Returns:
        Its sequence number, by which the reply is taken.
    """
    word = slot.load(Word.STATE)
    sequence = sequence_of(word) + 1
    assert state_of(word) is State.FREE, "the last request of this slot was neither taken nor withdrawn"
    slot.write_request(sequence, request)
    posted = slot.swap(Word.STATE, word, state_word(State.READY, sequence))
    assert posted, "another process wrote to this client's slot"
    return sequence


def take(slot: Slot[Any, ReplyT], sequence: int) -> ReplyT | None:
    """Owner: the reply to its request, once; None if there is none yet.

    Raises:
        WireError: the reply names another request; the server does not follow these rules.
    """
    done = state_word(State.DONE, sequence)
    if slot.load(Word.STATE) != done:
        return None
    echoed, reply = slot.read_reply()
    slot.swap(Word.STATE, done, state_word(State.FREE, sequence))
    if echoed != sequence:
        raise WireError(f"expert server: reply to request {echoed} in the place of that to {sequence}")
    return reply


def withdraw(slot: Slot[Any, Any], sequence: int) -> None:
    """Owner: want no reply any more, be it there, on its way or never to come; the slot is free for another request."""
    free = state_word(State.FREE, sequence)
    if not slot.swap(Word.STATE, state_word(State.READY, sequence), free):
        slot.swap(Word.STATE, state_word(State.DONE, sequence), free)


def release(slot: Slot[Any, Any], owner: int) -> None:
    """Owner of a free slot: leave it to others."""
    slot.swap(Word.OWNER, owner, NOBODY)


def pick_up(slot: Slot[RequestT, Any]) -> tuple[int, RequestT | WireError] | None:
    """Server: sequence number and request, if there is one to answer; what is wrong with it, if it cannot be read.

    The request may be withdrawn at any time, and another one written over it, so what is read here may be any bytes.
    It is the client's fault only if the state word shows afterwards that the request was wanted all along.
    """
    word = slot.load(Word.STATE)
    if state_of(word) is not State.READY:
        return None
    try:
        sequence, request = slot.read_request()
        if sequence == sequence_of(word):
            return sequence, request
        problem = WireError(f"expert request: {sequence} in the place of {sequence_of(word)}")
    except WireError as error:
        problem = error
    return (sequence_of(word), problem) if slot.load(Word.STATE) == word else None


def answer(slot: Slot[Any, ReplyT], sequence: int, reply: ReplyT) -> bool:
    """Server: reply to the request of this number; False if it is no longer wanted."""
    slot.write_reply(sequence, reply)
    return slot.swap(Word.STATE, state_word(State.READY, sequence), state_word(State.DONE, sequence))


def sweep(slot: Slot[Any, Any], sweeper: int, alive: Callable[[int], bool]) -> bool:
    """Any process: free a slot whose owner died; whether it did.

    The sweeper becomes the owner, then does what an owner does.  So no two sweep one slot at a time, a slot that
    changed hands meanwhile is left alone, and if the sweeper dies, the next one sweeps what it left.
    """
    owner = slot.load(Word.OWNER)
    if owner == NOBODY or alive(owner) or not slot.swap(Word.OWNER, owner, sweeper):
        return False
    word = slot.load(Word.STATE)
    free = state_word(State.FREE, sequence_of(word))
    if word != free and not slot.swap(Word.STATE, word, free):
        withdraw(slot, sequence_of(word))  # it was answered since
    release(slot, sweeper)
    return True


def is_stale(epoch: int, since: int) -> bool:
    """Whether a request must be refused since its client does not know yet what the server holds.

    Args:
        epoch: membership epoch of the client's routing table.
        since: epoch at which the server's experts last changed.  Other servers' coming and going does not concern it.
    """
    return epoch < since
