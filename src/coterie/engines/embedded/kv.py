"""The KV cache of one worker, in a file of shared memory that workers of the same host read.

The file holds a page with a header, then the array `[blocks, ...]`, block after block.  Its name ends with the
engine's id.  A neighbour only reads; whether what it read was still the prompt's, the owner says (see `messages`).
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie import shm
from coterie.errors import EngineError
from coterie.shm import SharedFile

PREFIX = "coterie-kv-"
KIND_BYTES = 16
_HEADER = struct.Struct("<8s16s16sQ")  # magic, engine id, kind, bytes of a block
_MAGIC = b"coteriKV"

Floats = npt.NDArray[np.float32]
KvBytes = npt.NDArray[np.uint8]
"""A cache as bytes, `[blocks, bytes of a block]`."""


def kv_kind(source: str, shape: Sequence[int]) -> bytes:
    """What two workers must agree on to exchange blocks.

    Args:
        source: fingerprint of the checkpoint.
        shape: of the cache; the number of blocks does not count.
    """
    text = f"{source} {tuple(shape[1:])}"
    return hashlib.blake2b(text.encode(), digest_size=KIND_BYTES).digest()


class KvFile:
    """A cache that this process owns.

    Attributes:
        engine_id: 32 hexadecimal digits, different for every process.
        kind: see `kv_kind`.
        array: the cache, float32, of the shape asked for, all zeros at first.
        bytes: the same memory, `[blocks, bytes of a block]`.
    """

    def __init__(self, shape: Sequence[int], kind: bytes, *, folder: str = shm.FOLDER) -> None:
        """Create the file.

        Raises:
            UnsupportedError: shared memory is too small or not there.
        """
        block_bytes = 4 * math.prod(shape[1:])
        self._file = SharedFile.create(PREFIX, mmap.PAGESIZE + shape[0] * block_bytes, folder)
        self.engine_id = self._file.token
        self.kind = kind
        _HEADER.pack_into(self._file.memory, 0, _MAGIC, bytes.fromhex(self.engine_id), kind, block_bytes)
        flat = np.frombuffer(self._file.memory, np.float32, offset=mmap.PAGESIZE)
        self.array: Floats = flat.reshape(shape)
        self.bytes: KvBytes = flat.view(np.uint8).reshape(shape[0], block_bytes)

    def close(self) -> None:
        """Remove the file; the memory goes with the process's last reference to it."""
        self._file.unlink()


@dataclass(slots=True)
class NeighbourFile:
    """Another worker's cache on this host, open for reading; a context manager."""

    _descriptor: int
    _block_bytes: int
    _blocks: int

    @classmethod
    def open(cls, engine_id: str, kind: bytes, block_bytes: int, *, folder: str = shm.FOLDER) -> NeighbourFile | None:
        """Open a cache; None where this host has none of that engine, kind and block size that this user may read.

        Args:
            engine_id: 32 hexadecimal digits.
            kind: see `kv_kind`.
            block_bytes: bytes of a block.
            folder: where the files are.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(Path(folder, PREFIX + engine_id), flags)
        except OSError:
            return None
        status = os.fstat(descriptor)
        wanted = _HEADER.pack(_MAGIC, bytes.fromhex(engine_id), kind, block_bytes)
        if not stat.S_ISREG(status.st_mode) or os.pread(descriptor, _HEADER.size, 0) != wanted:
            os.close(descriptor)
            return None
        return cls(descriptor, block_bytes, (status.st_size - mmap.PAGESIZE) // block_bytes)

    def read(self, block: int, into: KvBytes) -> None:
        """Copy a block.

        Raises:
            EngineError: the file has no such block.
        """
        if not 0 <= block < self._blocks:
            raise EngineError(f"block {block} is not among the {self._blocks} of the KV file")
        if os.preadv(self._descriptor, [into.data], mmap.PAGESIZE + block * self._block_bytes) != self._block_bytes:
            raise EngineError(f"block {block} of the KV file could not be read whole")

    def __enter__(self) -> NeighbourFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
