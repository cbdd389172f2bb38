"""What a collection has so far, on disk: a crash costs at most the requests in flight.

`TRACE.partial` is JSON lines: a header that says what was asked of whom, then one line per finished
request, each on disk (fsync) before the request counts as done.  A crash can only tear the last line.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.activations import TraceRecord, build_trace
from coterie.calibration.prompts import PromptFile
from coterie.errors import InputError, TraceError
from coterie.wire import decode_counts, encode_counts, shaped

_DTYPES = frozenset({"|u1", "<u2", "<u4", "<i2", "<i4", "<i8", "<f4"})


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be the same for a collection to go on.

    Attributes:
        model: name of the model.
        prompts: `PromptFile.digest`.
        max_tokens: output tokens of each request.
        records: what the source records of each request, `Source.records`.
        version: of this format.
    """

    model: str
    prompts: str
    max_tokens: int
    records: str
    version: int = 2


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array as JSON holds it.

    Attributes:
        dtype: one of numpy's little-endian names in `_DTYPES`.
        shape: its shape.
        data: base64 of its bytes in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes  # msgspec writes and reads bytes as base64

    @classmethod
    def of(cls, array: npt.NDArray[Any] | None) -> Numbers | None:
        """Write an array, if there is one."""
        if array is None:
            return None
        little = array.astype(array.dtype.newbyteorder("<"))
        return cls(little.dtype.str, little.shape, little.tobytes())

    def array(self) -> npt.NDArray[Any]:
        """Read the array.

        Raises:
            InputError: the dtype is not allowed, or the bytes do not fill the shape.
        """
        if self.dtype not in _DTYPES:
            raise InputError(f"an array of dtype {self.dtype[:20]!r}, not one of {', '.join(sorted(_DTYPES))}")
        dtype = np.dtype(self.dtype)
        if math.prod(self.shape) * dtype.itemsize != len(self.data):
            raise InputError(f"{len(self.data)} bytes do not fill an array of shape {self.shape} {dtype}")
        return shaped(self.data, dtype, self.shape, "array")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One finished request.

    Attributes:
        position: of the prompt in its file, from 0.
        prompt: counts envelope of the prompt.
        output: counts envelope of the output.
        output_tokens: length of the output.
        decode_ids: as in `TraceRecord`.
        gate_prob: as in `TraceRecord`.
        gate_logit: as in `TraceRecord`.
    """

    position: int
    prompt: Mapping[str, Any]
    output: Mapping[str, Any]
    output_tokens: int
    decode_ids: Numbers | None = None
    gate_prob: Numbers | None = None
    gate_logit: Numbers | None = None

    @classmethod
    def of(cls, position: int, record: TraceRecord) -> Entry:
        """The request as a line holds it."""
        return cls(
            position,
            encode_counts(record.prompt),
            encode_counts(record.output),
            record.output_tokens,
            Numbers.of(record.decode_ids),
            Numbers.of(record.gate_prob),
            Numbers.of(record.gate_logit),
        )

    def record(self, prompts: PromptFile) -> TraceRecord:
        """The request as the trace holds it.

        Raises:
            InputError: an envelope or array is malformed, or there is no such prompt.
        """
        if not 0 <= self.position < len(prompts.prompts):
            raise InputError(f"there is no prompt {self.position} among {len(prompts.prompts)}")
        prompt = prompts.prompts[self.position]
        return TraceRecord(
            decode_counts(self.prompt),
            decode_counts(self.output),
            self.output_tokens,
            prompt.hash,
            prompt.label,
            _array(self.decode_ids),
            _array(self.gate_prob),
            _array(self.gate_logit),
        )


def _array(numbers: Numbers | None) -> npt.NDArray[Any] | None:
    return None if numbers is None else numbers.array()


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
        """Take up what an earlier run left, or begin; a run that finished no request left nothing.

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
        if not self._header_fits(whole, torn, restart):
            whole, torn = [], b""
        if torn:
            notice(f"{self._path}: the last line was cut short by a crash; its request is sent again")
        for number, line in enumerate(whole[1:], 2):
            self._take_up(line, number)
        self._file.truncate(sum(len(line) + 1 for line in whole))
        if not whole:
            self._append(self._header)

    def check(self, record: TraceRecord) -> None:
        """See that one trace can hold a record beside those before it: found at the end, it would cost the trace.

        Raises:
            TraceError: it contradicts itself, or is not like the first one (request 0 in the message).
        """
        first = next(iter(self.records.values()), record)
        build_trace(self._header.model, [first, record])

    def add(self, position: int, record: TraceRecord) -> None:
        """Keep a finished request; it is on disk when this returns.

        Args:
            position: of its prompt in the prompt file, from 0.
            record: what a source recorded.

        Raises:
            TraceError: the file cannot be written.
        """
        self._append(Entry.of(position, record))
        self.records[position] = record

    def remove(self) -> None:
        """Delete the file: the trace took its place."""
        self._path.unlink(missing_ok=True)

    def _append(self, item: Header | Entry) -> None:
        try:
            self._file.write(msgspec.json.encode(item) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise TraceError(
                f"{self._path}: cannot be written: {error.strerror}; what is finished is kept, run again to go on"
            ) from None

    def _header_fits(self, whole: list[bytes], torn: bytes, restart: bool) -> bool:
        if not whole and msgspec.json.encode(self._header).startswith(torn):  # also an empty file
            return True
        try:
            found = _headers.decode(whole[0] if whole else torn)
        except (msgspec.DecodeError, RecursionError):
            found = None
        if found == self._header:
            return True
        if restart or (found is not None and len(whole) <= 1):  # no request of that run was finished
            return False
        raise TraceError(
            f"{self._path} was begun with {_describe(found)}, not with {_describe(self._header)}; "
            "finish that collection, delete the file, or pass --force to start again"
        )

    def _take_up(self, line: bytes, number: int) -> None:
        try:
            entry = _entries.decode(line)
            record = entry.record(self._prompts)
            self.check(record)
            self.records[entry.position] = record
        except (msgspec.DecodeError, RecursionError, InputError) as error:
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
    return f"model {header.model!r}, prompts {header.prompts[:8]}, {header.max_tokens} output tokens, {header.records}"
