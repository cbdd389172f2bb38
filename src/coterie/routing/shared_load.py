"""Load that several gateway processes of one host share: each writes a row of its own and adds up those of the others.

What gateways of other hosts said has rows, too, which are written by who heard it.

A row is a directory of workers that only grows, and two words of 64 bits for each: its load, and its last assignment.
A word is written and read whole, so nobody ever sees half of a change, and no lock can stay with who was killed.

    head         life << 32 | workers in the row; for decode workers, also what file the process announces
    keys[s]      worker in slot s: 64 bits of a hash of its identity
    loads[s]     requests << 40 | tokens: sums of such words are words of the sums
    assigned[s]  sequence number of the last assignment
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.routing.ledger import Load
from coterie.shm import fence

MOST_ROWS = 64
MOST_WORKERS = 1023
"""Different workers of a role in a process's life: slots are not used again, so that none is ever mistaken."""

_Words = npt.NDArray[np.uint64]
_SLOTS = MOST_WORKERS + 1  # the last one is always empty: where those look who do not find a worker
_HEAD, _KEYS, _LOADS, _ASSIGNED = range(4)
_ROW_BYTES = 4 * _SLOTS * 8
_ROLES = 2
_TOKEN_BITS = 40
_NAME_BITS = 24
_COUNT = (1 << 32) - 1

MOST_TOKENS = (1 << _TOKEN_BITS) // MOST_ROWS - 1
"""Of one row at one worker; more are shown as that."""

MOST_REQUESTS = (1 << 64 - _TOKEN_BITS) // MOST_ROWS - 1
"""Of one row at one worker."""


class Board:
    """Rows of load of one gateway, and its conversations, in memory that its processes share.

    A conversation is one word, `hash of its name << 24 | hash of its worker`, at a place that its name's hash tells;
    any process may write it.  Two conversations of one place displace each other, and a lost or mistaken one costs a
    cache hit and nothing else.

    Args:
        memory: at least `size(rows, sessions)` bytes, at first zero.
        rows: one for each process, and for each gateway of another host; 1 to 64.
        sessions: conversations that are to be remembered; there are four places for each.

    Raises:
        InputError: a number is out of range.
    """

    def __init__(self, memory: mmap.mmap | bytearray, rows: int, sessions: int = 0) -> None:
        words = np.frombuffer(memory, np.uint64, self.size(rows, sessions) // 8)
        loads = _ROLES * rows * _ROW_BYTES // 8
        self._rows = words[:loads].reshape(_ROLES, rows, 4, _SLOTS)
        self._sessions = words[loads:]

    @staticmethod
    def size(rows: int, sessions: int = 0) -> int:
        """Bytes that it needs."""
        if not 1 <= rows <= MOST_ROWS or sessions < 0:
            raise InputError(f"board: {rows} rows, {sessions} sessions; need 1 to {MOST_ROWS}, and 0 or more")
        return rows * _ROLES * _ROW_BYTES + 4 * sessions * 8

    def row(self, role: int, row: int, identity: Callable[[str], str] = str) -> SharedLoad:
        """The view of one process.

        Args:
            role: 0 or 1: prefill workers or decode workers.
            row: whose.
            identity: what a worker of this name is called by all, such as its URL.
        """
        return SharedLoad(self._rows[role], self._sessions, row, identity)

    def writer(self, role: int, row: int) -> Row:
        """A row for who writes what was heard of another gateway; cleared, or never written."""
        return Row(self._rows[role, row])

    def held(self, role: int, rows: int) -> dict[int, Load]:
        """What the first `rows` rows hold together, by `key_of` workers that any of them knows; no assignments."""
        total: dict[int, int] = {}
        for words in self._rows[role, :rows]:
            known = int(words[_HEAD, 0]) & _COUNT
            for key, load in zip(words[_KEYS, :known].tolist(), words[_LOADS, :known].tolist(), strict=True):
                total[key] = total.get(key, 0) + load
        return {key: _load(word) for key, word in total.items()}

    def mark(self, rows: int) -> bytes:
        """Another one whenever any of the first `rows` rows holds something else."""
        return self._rows[:, :rows, _LOADS].tobytes()

    @property
    def announcements(self) -> Announcements:
        """Files that processes have of their own."""
        return Announcements(self._rows[_ROLES - 1, :, _HEAD, 1:4])

    def clear(self, row: int) -> None:
        """Take back all that a process held and announced: it is dead, and nobody else writes its row."""
        for words in self._rows[:, row]:
            words[_LOADS] = 0
            words[_HEAD, 1:4] = 0
            words[_HEAD, 0] = ((int(words[_HEAD, 0]) >> 32) + 1) << 32


class Announcements:
    """The file that each process has of its own, if it has one, by the 32 hexadecimal digits that end its name.

    Args:
        words: three for each process: how many it has announced, twice, and the last one's digits.
    """

    def __init__(self, words: _Words) -> None:
        self._words = words

    def announce(self, process: int, token: str) -> None:
        """A process has another file from now on."""
        words, digits = self._words[process], int(token, 16)
        words[0] += np.uint64(1)
        fence()
        words[1:] = digits >> 64, digits & 0xFFFFFFFFFFFFFFFF
        fence()
        words[0] += np.uint64(1)

    def others(self, process: int) -> set[str]:
        """Those of all other rows; one that is just being announced is left out."""
        return {token for i, token in self._all() if i != process}

    def first(self, rows: int) -> set[str]:
        """Those of the first `rows` rows; likewise."""
        return {token for i, token in self._all() if i < rows}

    def _all(self) -> Iterator[tuple[int, str]]:
        before = self._words[:, 0].copy()
        fence()
        digits = self._words[:, 1:].tolist()
        fence()
        whole = (before > 0) & (before % 2 == 0) & (before == self._words[:, 0])
        return ((i, f"{high << 64 | low:032x}") for i, (high, low) in enumerate(digits) if whole[i])


class Row:
    """One row of one role, for the one who writes it.

    Args:
        words: of the row.
    """

    def __init__(self, words: _Words) -> None:
        self._words = words
        self._slots: dict[int, int] = {}

    def enter(self, keys: Sequence[int]) -> list[int]:
        """Slots of workers, which the row knows from now on.

        Raises:
            InputError: the row would know more than `MOST_WORKERS`; it is as before.
        """
        if not self.has_room(keys):
            raise InputError(f"board: more than {MOST_WORKERS} workers in a process's life; restart the gateway")
        for key in keys:
            self._enter(key)
        return [self._slots[key] for key in keys]

    def has_room(self, keys: Iterable[int]) -> bool:
        """Whether `enter` would take these."""
        return len(self._slots.keys() | keys) <= MOST_WORKERS

    def put(self, slot: int, load: Load) -> None:
        """This much is held of the worker in a slot; more than `MOST_TOKENS` are shown as that."""
        self._words[_LOADS, slot] = load.requests << _TOKEN_BITS | min(load.tokens, MOST_TOKENS)
        self._words[_ASSIGNED, slot] = load.assigned

    def replace(self, loads: Mapping[int, Load]) -> None:
        """This is all that is held, by keys of workers.

        Raises:
            InputError: see `enter`.
        """
        for slot, load in zip(self.enter(list(loads)), loads.values(), strict=True):
            self.put(slot, load)
        for key in self._slots.keys() - loads.keys():
            self.put(self._slots[key], Load())

    def _enter(self, key: int) -> None:
        if key in self._slots:
            return
        slot = self._slots[key] = len(self._slots)
        self._words[_KEYS, slot] = key
        self._words[_LOADS, slot] = self._words[_ASSIGNED, slot] = 0
        fence()
        self._words[_HEAD, 0] += np.uint64(1)  # last: until now nobody looks there


class SharedLoad:
    """What the other rows of one role hold, and the row of this process; see `Others`.  Made by `Board.row`."""

    def __init__(self, rows: _Words, sessions: _Words, row: int, identity: Callable[[str], str]) -> None:
        self._rows = rows
        self._words = rows.reshape(-1)
        self._mine = Row(rows[row])
        self._row = row
        self._sessions = sessions
        self._identity = identity
        self.attach(())

    def attach(self, names: Sequence[str]) -> None:
        """See `Others.attach`.

        Raises:
            InputError: this process had more than `MOST_WORKERS` workers of this role in its life.
        """
        keys = [key_of(self._identity(name)) for name in names]
        self._places = self._mine.enter(keys)
        self._keys = keys
        self._names = {key & ((1 << _NAME_BITS) - 1): name for key, name in zip(keys, names, strict=True)}
        self._heads = self._raw = b""  # unlike any: look all workers up again
        self._seen = [(0, 0)] * len(names)

    def changed(self) -> Iterator[tuple[int, Load]]:
        """See `Others.changed`."""
        taken = self._take()
        if (raw := taken.tobytes()) == self._raw:
            return
        loads, assigned = taken[0].sum(axis=0).tolist(), taken[1].max(axis=0).tolist()
        for i, now in enumerate(zip(loads, assigned, strict=True)):
            if now != self._seen[i]:
                self._seen[i] = now
                yield i, _load(*now)
        self._raw = raw

    def show(self, position: int, own: Load) -> None:
        """See `Others.show` and `Row.put`."""
        self._mine.put(self._places[position], own)

    def remember(self, session: str, worker: str) -> None:
        """See `Others.remember`."""
        if len(self._sessions):
            place, mark = self._find(session)
            self._sessions[place] = mark | key_of(self._identity(worker)) & ((1 << _NAME_BITS) - 1)

    def recall(self, session: str) -> str | None:
        """See `Others.recall`."""
        if not len(self._sessions):
            return None
        place, mark = self._find(session)
        word = int(self._sessions[place])
        worker = word & ((1 << _NAME_BITS) - 1)
        return self._names.get(worker) if word - worker == mark else None

    def _find(self, session: str) -> tuple[int, int]:
        name = key_of(session)
        return name % len(self._sessions), name >> _NAME_BITS << _NAME_BITS

    def _take(self) -> _Words:
        """Words of load and of assignment, `[2, rows, positions]`; zeros for this row and for workers not in a row."""
        while True:
            heads = self._rows[:, _HEAD, 0].tobytes()
            fence()
            if heads != self._heads:
                self._look_up(heads)
            taken = self._words.take(self._at)
            fence()
            if heads == self._rows[:, _HEAD, 0].tobytes():  # else a slot may have become another worker's meanwhile
                return taken

    def _look_up(self, heads: bytes) -> None:
        """Find this process's workers in the rows of the others."""
        self._heads = heads
        slots = np.full((len(self._rows), len(self._keys)), _SLOTS - 1)
        for row, head in enumerate(np.frombuffer(heads, np.uint64).tolist()):
            if row != self._row:
                known = self._rows[row, _KEYS, : head & _COUNT].tolist()
                place = {key: slot for slot, key in enumerate(known)}
                slots[row] = [place.get(key, _SLOTS - 1) for key in self._keys]
        start = np.arange(len(slots))[:, None] * (4 * _SLOTS)
        self._at = np.stack([start + part * _SLOTS + slots for part in (_LOADS, _ASSIGNED)])


def _load(word: int, assigned: int = 0) -> Load:
    return Load(word >> _TOKEN_BITS, word & ((1 << _TOKEN_BITS) - 1), assigned)


def key_of(text: str) -> int:
    """What a worker or a conversation of this identity is known by: 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
