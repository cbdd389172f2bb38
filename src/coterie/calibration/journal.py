"""What a collection has so far, on disk: a crash costs at most the requests in flight.

`TRACE.partial` is JSON lines: a header that says what was asked of whom, then one line per finished
request, each on disk (fsync) before the request counts as done.  A crash can only tear the last line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from coterie.activations import TraceRecord
from coterie.calibration.prompts import PromptFile
from coterie.errors import InputError, TraceError
from coterie.wire import decode_counts


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be the same for a collection to go on.

    Attributes:
        model: name of the model.
        prompts: `PromptFile.digest`.
        max_tokens: output tokens of each request.
        version: of this format.
    """

    model: str
    prompts: str
    max_tokens: int
    version: int = 1


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished request.

    Attributes:
        position: of the prompt in its file, from 0.
        prompt: counts envelope of the prompt.
        output: counts envelope of the output.
        output_tokens: length of the output.
    """

    position: int
    prompt: Mapping[str, Any]
    output: Mapping[str, Any]
    output_tokens: int

    def record(self, prompts: PromptFile) -> TraceRecord:
        """The request as the trace holds it.

        Raises:
            InputError: an envelope is malformed, or there is no such prompt.
        """
        if not 0 <= self.position < len(prompts.prompts):
            raise InputError(f"there is no prompt {self.position} among {len(prompts.prompts)}")
        prompt = prompts.prompts[self.position]
        return TraceRecord(
            decode_counts(self.prompt), decode_counts(self.output), self.output_tokens, prompt.hash, prompt.label
        )


_headers = msgspec.json.Decoder(Header)
_entries = msgspec.json.Decoder(Entry)


class Journal:
    """The open file; a context manager.

    Attributes:
        records: finished requests by position of their prompt.
    """

    def __init__(self, path: Path, header: Header, prompts: PromptFile) -> None:
        self.records: dict[int, TraceRecord] = {}
        self._path = path
        self._header = header
        self._prompts = prompts
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise TraceError(f"{path}: cannot be written: {error.strerror}") from None

    def load(self, *, restart: bool, notice: Callable[[str], None]) -> None:
        """Take up what an earlier run left, or begin.

        Args:
            restart: throw away what was asked of another model, prompts or length instead of refusing it.
            notice: told of a torn line that was dropped.

        Raises:
            TraceError: another run is writing the file, its header differs, or it is damaged before its last line.
        """
        self._lock()
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        whole, torn = lines[:-1], lines[-1]
        if whole and not self._header_fits(whole[0], restart):
            whole, torn = [], b""
        if torn:
            notice(f"{self._path}: the last line was cut short by a crash; its request is sent again")
        for number, line in enumerate(whole[1:], 2):
            self._take_up(line, number)
        self._file.truncate(sum(len(line) + 1 for line in whole))
        if not whole:
            self._append(self._header)

    def add(self, entry: Entry) -> None:
        """Keep a finished request; it is on disk when this returns.

        Raises:
            InputError: an envelope is malformed; nothing was kept.
            TraceError: the file cannot be written.
        """
        record = entry.record(self._prompts)
        self._append(entry)
        self.records[entry.position] = record

    def remove(self) -> None:
        """Delete the file: the trace took its place."""
        self._path.unlink()

    def _append(self, item: Header | Entry) -> None:
        try:
            self._file.write(msgspec.json.encode(item) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise TraceError(
                f"{self._path}: cannot be written: {error.strerror}; what is finished is kept, run again to go on"
            ) from None

    def _header_fits(self, line: bytes, restart: bool) -> bool:
        try:
            found = _headers.decode(line)
        except msgspec.DecodeError:
            found = None
        if found == self._header:
            return True
        if restart:
            return False
        raise TraceError(
            f"{self._path} was begun with {_describe(found)}, not with {_describe(self._header)}; "
            "finish that collection, delete the file, or pass --force to start again"
        )

    def _take_up(self, line: bytes, number: int) -> None:
        try:
            entry = _entries.decode(line)
            self.records[entry.position] = entry.record(self._prompts)
        except (msgspec.DecodeError, InputError) as error:
            raise TraceError(
                f"{self._path}:{number} is damaged ({error}); delete the file to collect from the start"
            ) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TraceError(f"{self._path} is being written by another `coterie collect`") from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # it tries once more to write what was already reported
            self._file.close()


def _describe(header: Header | None) -> str:
    if header is None:
        return "another format"
    return f"model {header.model!r}, prompts {header.prompts[:8]}, {header.max_tokens} output tokens"
