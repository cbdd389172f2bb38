"""Files in `/dev/shm` that processes of one host share, and that no killed process leaves there for long.

The process that creates a file holds its lock until it removes it.  Whoever creates the next one of the same kind
removes those whose lock nobody holds: their creator was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from coterie.errors import UnsupportedError

FOLDER = "/dev/shm"  # noqa: S108 - memory, and the files are for this user alone


@dataclass(slots=True)
class SharedFile:
    """A file of shared memory that this process created.

    Attributes:
        path: where it is.
        token: 32 hexadecimal digits that end its name, different for every file.
        memory: its bytes, mapped.
    """

    path: Path
    token: str
    memory: mmap.mmap
    _descriptor: int | None

    @classmethod
    def create(cls, prefix: str, size: int, folder: str = FOLDER) -> SharedFile:
        """Create a file, only readable by this user, with its memory reserved, and locked until `unlink`.

        Args:
            prefix: of its name; files of this prefix whose creator was killed are removed.
            size: in bytes.
            folder: where, on a memory file system.

        Raises:
            UnsupportedError: shared memory is too small or not there.
        """
        try:
            sweep(prefix, folder)
            descriptor, path, token = _locked_file(prefix, folder)
        except OSError as error:
            raise UnsupportedError(f"cannot create shared memory in {folder}: {error}") from error
        try:
            os.posix_fallocate(descriptor, 0, size)
            return cls(path, token, mmap.mmap(descriptor, size), descriptor)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            hint = " (containers: raise --shm-size)" if error.errno == errno.ENOSPC else ""
            raise UnsupportedError(
                f"cannot reserve {size} bytes of shared memory in {folder}: {error}{hint}"
            ) from error

    def unlink(self) -> None:
        """Remove the file; what is mapped stays."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self.path.unlink(missing_ok=True)
            os.close(descriptor)


def _locked_file(prefix: str, folder: str) -> tuple[int, Path, str]:
    while True:
        token = secrets.token_hex(16)
        path = Path(folder, prefix + token)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path, token
        os.close(descriptor)  # another process's sweep took it between the two calls


def sweep(prefix: str, folder: str = FOLDER) -> None:
    """Remove files that nobody holds: their creator was killed."""
    for path in Path(folder).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # another user's, locked, or gone meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def fence() -> None:
    """Let other processes see what was written before no later than what is written after; likewise for reading.

    Raises:
        UnsupportedError: this machine needs libatomic for that, and has none.
    """
    _barrier()()


@cache
def _barrier() -> Callable[[], object]:
    if platform.machine() in ("x86_64", "AMD64"):
        return lambda: None  # the processor keeps the order of stores, and that of loads; so does the interpreter
    try:
        atomic = ctypes.PyDLL("libatomic.so.1")
    except OSError as error:
        message = f"shared memory: {error}; install it (Debian: libatomic1, Fedora: libatomic)"
        raise UnsupportedError(message) from error
    return partial(atomic.atomic_thread_fence, 5)  # __ATOMIC_SEQ_CST
