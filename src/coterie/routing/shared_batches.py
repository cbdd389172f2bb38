"""What requests in flight use, shared by the processes of one host: each writes sums of its own, and reads the others'.

A process's sums are in a file of its own, since their size follows from the model, which is known once the first
request comes.  It announces the file on the board; when the process is dead, whoever clears its row takes that back.
A group's sums are too long to be read whole while they change: its version is odd meanwhile, and who meets that looks
again later.

    header               groups, layers, experts
    keys[g]              64 bits of a hash of the group's identity
    versions[g]          how often requests and sums were changed, twice
    requests[g]
    sums[g, L * E]
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.routing.marginal_batches import Row, Sums
from coterie.routing.shared_load import Announcements, key_of
from coterie.shm import FOLDER, SharedFile, fence

PREFIX = "coterie-batches-"
_HEADER = 3
_TRIES = 3


class _Sums:
    """The words of a file."""

    def __init__(self, memory: mmap.mmap, groups: int, pairs: int) -> None:
        words: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64)
        self.header = words[:_HEADER]
        self.keys, self.versions, self.requests = words[_HEADER : _HEADER + 3 * groups].reshape(3, groups)
        self.sums = words[_HEADER + 3 * groups :].reshape(groups, pairs)


class SharedBatches:
    """What requests in flight at other processes use; see `OtherBatches`.

    Args:
        announcements: of all processes.
        process: number of this one.
        groups: names of the groups.
        geometry: of the model; files of another are left out.
        identity: what a group of this name is called by all, such as its URL.
        folder: where files are, on a memory file system.

    Raises:
        UnsupportedError: shared memory is too small or not there.
    """

    def __init__(
        self,
        announcements: Announcements,
        process: int,
        groups: Sequence[str],
        geometry: ModelGeometry,
        identity: Callable[[str], str] = str,
        folder: str = FOLDER,
    ) -> None:
        pairs = geometry.layers * geometry.experts
        self._file = SharedFile.create(PREFIX, 8 * (_HEADER + len(groups) * (3 + pairs)), folder)
        self._mine = _Sums(self._file.memory, len(groups), pairs)
        self._shape = (geometry.layers, geometry.experts)
        self._mine.header[:] = (len(groups), *self._shape)
        self._mine.keys[:] = [_signed(key_of(identity(group))) for group in groups]
        self._process = process
        self._folder = folder
        self._others: dict[str, _Other] = {}
        self._marks: list[object] = [()] * len(groups)
        self._seen = np.zeros_like(self._mine.sums)
        self._seen_requests = [0] * len(groups)
        self._announcements = announcements
        announcements.announce(process, self._file.token)

    def close(self) -> None:
        """Remove the file; those who have it open see that it is no longer announced, or another instead."""
        self._file.unlink()

    def show(self, group: int, row: Row, sign: int) -> None:
        """See `OtherBatches.show`."""
        sums = self._mine.sums[group]
        self._mine.versions[group] += 1
        fence()
        (np.add if sign > 0 else np.subtract)(sums, row, out=sums)
        self._mine.requests[group] += sign
        fence()
        self._mine.versions[group] += 1

    def changed(self) -> Iterator[tuple[int, int, Sums]]:
        """See `OtherBatches.changed`; a group that somebody is just changing is left for the next time."""
        self._open_others()
        for group, mark in enumerate(self._marks):
            now = tuple((token, other.version(group)) for token, other in self._others.items())
            if now != mark and (total := self._total(group)) is not None:
                self._marks[group] = now
                yield from self._grown(group, *total)

    def _grown(self, group: int, requests: int, sums: Sums) -> Iterator[tuple[int, int, Sums]]:
        more = requests - self._seen_requests[group], sums - self._seen[group]
        self._seen_requests[group], self._seen[group] = requests, sums
        if more[0] or more[1].any():
            yield group, *more

    def _total(self, group: int) -> tuple[int, Sums] | None:
        """What all others have of a group now; None if one could not be read."""
        requests, sums = 0, np.zeros_like(self._seen[group])
        for other in self._others.values():
            read = other.read(group)
            if read is None:
                return None
            requests += read[0]
            sums += read[1]
        return requests, sums

    def _open_others(self) -> None:
        tokens = self._announcements.others(self._process)
        for token in self._others.keys() - tokens:
            del self._others[token]
        for token in tokens:
            if token not in self._others and (words := self._open(token)) is not None:
                self._others[token] = _Other(words, self._mine.keys)

    def _open(self, token: str) -> _Sums | None:
        """A process's file; None if it is gone by now, or of another model."""
        try:
            with Path(self._folder, PREFIX + token).open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except OSError:
            return None
        groups, layers, experts = np.frombuffer(memory, np.int64, _HEADER).tolist()
        return _Sums(memory, groups, layers * experts) if (layers, experts) == self._shape else None


class _Other:
    """Another process's sums, by this one's groups."""

    def __init__(self, words: _Sums, keys: npt.NDArray[np.int64]) -> None:
        places = {key: place for place, key in enumerate(words.keys.tolist())}
        self._words = words
        self._places = [places.get(key) for key in keys.tolist()]

    def version(self, group: int) -> int:
        """Of a group; 0 where this process does not have it."""
        place = self._places[group]
        return 0 if place is None else int(self._words.versions[place])

    def read(self, group: int) -> tuple[int, Sums | int] | None:
        """Requests and sums of a group; None if they change all the time."""
        place = self._places[group]
        if place is None:
            return 0, 0
        for _ in range(_TRIES):
            version = int(self._words.versions[place])
            fence()
            requests, sums = int(self._words.requests[place]), self._words.sums[place].copy()
            fence()
            if version % 2 == 0 and version == int(self._words.versions[place]):
                return requests, sums
        return None


def _signed(key: int) -> int:
    return key - (key >> 63 << 64)
