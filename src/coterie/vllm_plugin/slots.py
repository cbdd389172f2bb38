"""Shared memory between the worker that sums counts and the scheduler that returns them.

vLLM asks for a finished request's `kv_transfer_params` before it hands over what the workers reported
for that step, so sums travel through a file in `/dev/shm` of our own.  The worker writes a sum before
it sends its step's output, and the scheduler reads it after receiving that output.

Each slot belongs to one request at a time and has three parts: the prompt's sum, and two sums of the
whole request that alternate, so that a step still in flight never overwrites the sum of the step
before it.  A sum carries the ticket of its job: a slot that was reused cannot be mistaken for another
request's.  The file is unlinked as soon as the worker has mapped it, so a killed engine leaves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.errors import UnsupportedError

PREFIX = "coterie-counts-"
PARTS = 3
PROMPT_PART = 0
_MAGIC = 0x636F7465726965  # "coterie"
_HEADER = 8  # int64 words: magic, layers as mapped by the worker, then spare


class Slots:
    """Fixed slots of counts, `[slots, PARTS, layers, experts]` int32, each with a ticket and a token count.

    Args:
        buffer: memory that both sides map.
        slots: number of slots.
        layers: layers that a sum may have (an upper bound: dense layers are not written).
        experts: experts per layer.
    """

    def __init__(self, buffer: mmap.mmap, slots: int, layers: int, experts: int) -> None:
        self._buffer = buffer
        self._header = np.frombuffer(buffer, np.int64, _HEADER)
        heads = slots * PARTS * 2
        self._heads = np.frombuffer(buffer, np.int64, heads, offset=8 * _HEADER).reshape(slots, PARTS, 2)
        offset = 8 * (_HEADER + heads)
        counts = np.frombuffer(buffer, np.int32, slots * PARTS * layers * experts, offset=offset)
        self._counts = counts.reshape(slots, PARTS, layers * experts)
        self._experts = experts
        self._file: tuple[int, Path] | None = None

    @staticmethod
    def size(slots: int, layers: int, experts: int) -> int:
        """Bytes of the shared file."""
        return 8 * _HEADER + slots * PARTS * (16 + 4 * layers * experts)

    @classmethod
    def create(cls, slots: int, layers: int, experts: int, folder: str = "/dev/shm") -> tuple[Slots, Path]:  # noqa: S108
        """Create the file, only readable by this user, with its memory reserved, and locked until `unlink`.

        Raises:
            UnsupportedError: shared memory is too small or not there.
        """
        size = cls.size(slots, layers, experts)
        try:
            _sweep(folder)
            descriptor, name = _locked_file(folder)
        except OSError as error:
            raise UnsupportedError(f"cannot create shared memory in {folder}: {error}") from error
        try:
            os.posix_fallocate(descriptor, 0, size)
            buffer = mmap.mmap(descriptor, size)
        except OSError as error:
            os.unlink(name)
            os.close(descriptor)
            hint = " (containers: raise --shm-size)" if error.errno == errno.ENOSPC else ""
            raise UnsupportedError(
                f"cannot reserve {size} bytes of shared memory in {folder}: {error}{hint}"
            ) from error
        table = cls(buffer, slots, layers, experts)
        table._header[0] = _MAGIC
        table._file = (descriptor, Path(name))
        return table, Path(name)

    def unlink(self) -> None:
        """Scheduler: remove the file; what is mapped stays."""
        if self._file is not None:
            descriptor, path = self._file
            self._file = None
            path.unlink(missing_ok=True)
            os.close(descriptor)

    @classmethod
    def open(cls, path: str, slots: int, layers: int, experts: int) -> Slots:
        """Map a file made by `create`.

        Raises:
            UnsupportedError: the file is gone (scheduler and worker on different hosts) or not ours.
        """
        try:
            with open(path, "r+b") as file:
                buffer = mmap.mmap(file.fileno(), cls.size(slots, layers, experts))
        except (OSError, ValueError) as error:
            raise UnsupportedError(
                f"the worker cannot map the scheduler's shared memory {path} ({error}); "
                "scheduler and worker must run on one host"
            ) from error
        table = cls(buffer, slots, layers, experts)
        if int(table._header[0]) != _MAGIC:
            raise UnsupportedError(f"{path} is not coterie's shared memory")
        return table

    def announce(self, layers: int) -> None:
        """Worker: say how many MoE layers a sum has, which also says that the file is mapped."""
        self._header[1] = layers

    @property
    def announced_layers(self) -> int:
        """MoE layers of a sum; 0 before the worker has mapped the file."""
        return int(self._header[1])

    def write(self, slot: int, part: int, ticket: int, tokens: int, counts: npt.NDArray[np.int32]) -> None:
        """Worker: store a sum `[L, E]` over `tokens` counted tokens."""
        self._counts[slot, part, : counts.size] = counts.reshape(-1)
        self._heads[slot, part] = (ticket, tokens)

    def read(self, slot: int, part: int, ticket: int) -> tuple[int, npt.NDArray[np.int32]] | None:
        """Scheduler: counted tokens and a copy of the sum, or None where the worker did not write this ticket."""
        found, tokens = (int(word) for word in self._heads[slot, part])
        if found != ticket:
            return None
        layers = self.announced_layers
        return tokens, self._counts[slot, part, : layers * self._experts].reshape(layers, self._experts).copy()


def _locked_file(folder: str) -> tuple[int, str]:
    while True:
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another engine's sweep took it between the two calls


def _sweep(folder: str) -> None:
    """Remove files whose engine was killed before its worker mapped them: nobody holds their lock."""
    for path in Path(folder).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # another user's, locked, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
