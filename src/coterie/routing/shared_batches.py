"""What requests in flight use, shared by the processes of one host: each writes sums of its own, and reads the others'.

What gateways of other hosts said is in files like theirs, which are written by who heard it.

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

import contextlib
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.counting import Row, Sums
from coterie.routing.shared_load import Announcements, key_of
from coterie.shm import FOLDER, SharedFile, fence

PREFIX = "coterie-batches-"
_HEADER = 3
_TRIES = 3


Shape = tuple[int, int]
"""Layers and experts of a model."""


class _Sums:
    """The words of a file."""

    def __init__(self, memory: mmap.mmap, groups: int, pairs: int) -> None:
        words: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64)
        self.header = words[:_HEADER]
        self.keys, self.versions, self.requests = words[_HEADER : _HEADER + 3 * groups].reshape(3, groups)
        self.sums = words[_HEADER + 3 * groups :].reshape(groups, pairs)

    @property
    def shape(self) -> Shape:
        _, layers, experts = self.header.tolist()
        return layers, experts

    @contextlib.contextmanager
    def changing(self, group: int) -> Iterator[None]:
        """Readers see what was before the block, or what is after it."""
        self.versions[group] += 1
        fence()
        yield
        fence()
        self.versions[group] += 1

    def read(self, group: int) -> tuple[int, Sums] | None:
        """Requests and sums of a group; None if they change all the time."""
        for _ in range(_TRIES):
            version = int(self.versions[group])
            fence()
            requests, sums = int(self.requests[group]), self.sums[group].copy()
            fence()
            if version % 2 == 0 and version == int(self.versions[group]):
                return requests, sums
        return None


def _create(keys: Sequence[int], shape: Shape, folder: str) -> tuple[SharedFile, _Sums]:
    """A new file of these groups.

    Raises:
        UnsupportedError: shared memory is too small or not there.
    """
    pairs = shape[0] * shape[1]
    file = SharedFile.create(PREFIX, 8 * (_HEADER + len(keys) * (3 + pairs)), folder)
    sums = _Sums(file.memory, len(keys), pairs)
    sums.header[:] = (len(keys), *shape)
    sums.keys[:] = [_signed(key) for key in keys]
    return file, sums


class _Files:
    """Those of the files that others announce which can be opened.

    Attributes:
        opened: by token.
    """

    def __init__(self, folder: str) -> None:
        self.opened: dict[str, _Sums] = {}
        self._folder = folder

    def follow(self, tokens: set[str]) -> None:
        """These are announced now."""
        for token in self.opened.keys() - tokens:
            del self.opened[token]
        for token in sorted(tokens - self.opened.keys()):
            if (words := self._open(token)) is not None:
                self.opened[token] = words

    def _open(self, token: str) -> _Sums | None:
        try:
            with Path(self._folder, PREFIX + token).open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except OSError:  # gone by now
            return None
        groups, layers, experts = np.frombuffer(memory, np.int64, _HEADER).tolist()
        return _Sums(memory, groups, layers * experts)


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
        keys = [key_of(identity(group)) for group in groups]
        self._file, self._mine = _create(keys, (geometry.layers, geometry.experts), folder)
        self._process = process
        self._files = _Files(folder)
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
        with self._mine.changing(group):
            (np.add if sign > 0 else np.subtract)(sums, row, out=sums)
            self._mine.requests[group] += sign

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
        """Follow who is there; files of another model are left out."""
        self._files.follow(self._announcements.others(self._process))
        found = {token: words for token, words in self._files.opened.items() if words.shape == self._mine.shape}
        for token in self._others.keys() - found.keys():
            del self._others[token]
        for token in found.keys() - self._others.keys():
            self._others[token] = _Other(found[token], self._mine.keys)


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
        return (0, 0) if place is None else self._words.read(place)


class HeldBatches:
    """What the requests of all processes of this gateway use together, for who tells gateways of other hosts.

    Args:
        announcements: of all processes.
        rows: the first so many are this gateway's.
        folder: where files are.

    Attributes:
        shape: of the model; None before any request told it.
    """

    def __init__(self, announcements: Announcements, rows: int, folder: str = FOLDER) -> None:
        self.shape: Shape | None = None
        self._announcements = announcements
        self._rows = rows
        self._files = _Files(folder)
        self._last: dict[tuple[str, int], tuple[int, Sums]] = {}

    def take(self) -> dict[int, tuple[int, Sums]]:
        """Requests and sums of the groups that have any, by the `key_of` their identity.

        Processes that are at another model than one of them, whichever was met first, are left out.  What is just
        being changed is as it was at the last call.
        """
        self._files.follow(self._announcements.first(self._rows))
        self.shape = next((words.shape for words in self._files.opened.values()), self.shape)
        last, self._last = self._last, {}
        total: dict[int, tuple[int, Sums]] = {}
        for token, words in self._files.opened.items():
            if words.shape == self.shape:
                for group, key in enumerate(words.keys.tolist()):
                    read = words.read(group) or last.get((token, group))
                    if read is not None and read[0]:
                        self._last[token, group] = read
                        known = total.get(_unsigned(key))
                        total[_unsigned(key)] = read if known is None else (known[0] + read[0], known[1] + read[1])
        return total


class HeardBatches:
    """What a gateway of another host said that its requests use, for the processes of this one.

    Args:
        announcements: of all processes.
        row: whose announcement is the other gateway's.
        folder: where files are.
    """

    def __init__(self, announcements: Announcements, row: int, folder: str = FOLDER) -> None:
        self._announcements = announcements
        self._row = row
        self._folder = folder
        self._file: SharedFile | None = None
        self._sums: _Sums | None = None
        self._places: dict[int, int] = {}

    def replace(self, groups: Sequence[int], shape: Shape | None, held: Mapping[int, tuple[int, Sums]]) -> None:
        """This is all that its requests use.

        Args:
            groups: keys of all groups.
            shape: of the model; None where it does not say what they use.
            held: requests and their sums, by key; nothing for the rest.

        Raises:
            UnsupportedError: shared memory is too small or not there.
        """
        if shape is not None and not self._fits(groups, shape):
            self._begin(groups, shape)
        if self._sums is None:
            return
        for key, place in self._places.items():
            requests, sums = held.get(key, (0, 0))
            if requests or self._sums.requests[place]:
                with self._sums.changing(place):
                    self._sums.sums[place] = sums
                    self._sums.requests[place] = requests

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink()

    def _fits(self, groups: Sequence[int], shape: Shape) -> bool:
        return self._sums is not None and self._sums.shape == shape and self._places.keys() >= set(groups)

    def _begin(self, groups: Sequence[int], shape: Shape) -> None:
        former = self._file
        self._file, self._sums = _create(groups, shape, self._folder)
        self._places = {key: place for place, key in enumerate(groups)}
        self._announcements.announce(self._row, self._file.token)
        if former is not None:
            former.unlink()


def _signed(key: int) -> int:
    return key - (key >> 63 << 64)


def _unsigned(key: int) -> int:
    return key & ((1 << 64) - 1)
