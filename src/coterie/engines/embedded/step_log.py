"""Measured decode steps in a file, for `coterie simulate --steps`."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from coterie.errors import ConfigError
from coterie.latency import COLUMNS, StepPoint

MOST_BYTES = 8 << 20
"""Half of what `latency.read_step_points` reads; some 300,000 steps."""

_HEADER = ",".join(COLUMNS).encode() + b"\n"
_log = logging.getLogger("coterie.engine")


class StepLog:
    """A line for each decode step; several workers may write to one file, a killed one leaves no part of a line.

    Each line is appended by one call of the operating system.  Once the file has `MOST_BYTES`, no more are written.

    Args:
        path: the file; lines are added to it where it is such a file already.

    Raises:
        ConfigError: it cannot be written, or is another kind of file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # so that of several that begin at once only one writes the header
            self._begin(self._file)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            raise ConfigError(f"--log-steps {path}: cannot be written: {error.strerror}") from None

    def _begin(self, file: int) -> None:
        found = os.pread(file, len(_HEADER), 0)
        if not found:
            os.write(file, _HEADER)
        elif found != _HEADER:
            os.close(file)
            raise ConfigError(f"--log-steps {self._path}: a file that does not begin with {_HEADER.decode().strip()}")

    def add(self, step: StepPoint) -> None:
        """Write a step down; a disk that is full ends the log, not the engine."""
        if self._file is None:
            return
        line = f"{step.requests:g},{step.active:g},{step.step_s * 1000:.4f}\n".encode()
        try:
            os.write(self._file, line)
            full = os.lseek(self._file, 0, os.SEEK_CUR) >= MOST_BYTES
        except OSError as error:
            _log.warning("--log-steps %s: no more steps are written: %s", self._path, error.strerror)
            self.close()
            return
        if full:
            _log.warning("--log-steps %s: %d bytes are enough; no more steps are written", self._path, MOST_BYTES)
            self.close()

    def close(self) -> None:
        """No more is written."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
