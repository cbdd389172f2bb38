"""Memory-mapped safetensors files, in numpy alone: bfloat16 is read without torch.

Layout (https://github.com/huggingface/safetensors#format): a little-endian uint64 header length, a JSON header that
gives each tensor's dtype, shape and byte range, then the tensors without gaps.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.modeling.tiles import Floats

MAX_HEADER_BYTES = 100_000_000  # as the format's own reader
_PREFIX = 8
_METADATA = "__metadata__"
_FLOATS: dict[str, npt.DTypeLike] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_BYTES = "U8"
_DTYPES: dict[str, npt.DTypeLike] = {**_FLOATS, _BYTES: "u1"}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """An open safetensors file; arrays are read where they are asked for.

    Attributes:
        path: the file.
        metadata: its string-to-string metadata.
        header: the header's bytes, by which two versions of a file can be told apart.
        data: the bytes of all tensors, in place.
    """

    path: Path
    metadata: Mapping[str, str]
    header: bytes
    data: npt.NDArray[np.uint8]
    _entries: Mapping[str, _Entry]

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Map a file and check that the tensors it announces fill it.

        Raises:
            InputError: it cannot be read, is truncated or is no safetensors file.
        """
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        size = int.from_bytes(mapped[:_PREFIX], "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, len(mapped) - _PREFIX):
            raise InputError(f"{path}: truncated, or not a safetensors file")
        header = mapped[_PREFIX : _PREFIX + size]
        data = np.frombuffer(mapped, np.uint8, offset=_PREFIX + size)
        metadata, entries = _decode(path, header)
        _check_extents(path, entries, len(data))
        return cls(path, metadata, header, data, entries)

    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._entries[name].shape)

    def dtype(self, name: str) -> str:
        """A tensor's dtype, as the file names it."""
        return self._entries[name].dtype

    def raw(self, name: str, place: int | None = None) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor, or of one place of its first axis, where they lie in the file."""
        start, stop = self._entries[name].data_offsets
        if place is not None:
            size = (stop - start) // self._entries[name].shape[0]
            start, stop = start + place * size, start + (place + 1) * size
        return self.data[start:stop]

    def floats(self, name: str, place: int | None = None) -> Floats:
        """A tensor as float32, or one place of its first axis: as it lies there if stored so, else a converted copy.

        Raises:
            InputError: it is of a dtype other than F32, F16 or BF16.
        """
        entry = self._entries[name]
        if entry.dtype not in _FLOATS:
            raise InputError(
                f"{self.path}: {name} is of dtype {entry.dtype[:20]!r}; only {', '.join(_FLOATS)} can be read "
                "(quantised checkpoints are not supported)"
            )
        values = self.raw(name, place).view(_FLOATS[entry.dtype])
        values = values.reshape(entry.shape if place is None else entry.shape[1:])
        return _widen_bfloat16(values) if entry.dtype == "BF16" else values.astype(np.float32, copy=False)

    def codes(self, name: str, place: int) -> npt.NDArray[np.uint8]:
        """One place of the first axis of a tensor of bytes.

        Raises:
            InputError: it is of another dtype.
        """
        entry = self._entries[name]
        if entry.dtype != _BYTES:
            raise InputError(f"{self.path}: {name} is of dtype {entry.dtype[:20]!r}; it should be {_BYTES}")
        return self.raw(name, place).reshape(entry.shape[1:])


def _widen_bfloat16(bits: npt.NDArray[np.uint16]) -> Floats:
    """The upper half of a float32 is a bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _decode(path: Path, header: bytes) -> tuple[Mapping[str, str], dict[str, _Entry]]:
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(_METADATA, b"{}"), type=dict[str, str])
        return metadata, {name: msgspec.json.decode(part, type=_Entry) for name, part in parts.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: damaged header: {error}") from None


def _check_extents(path: Path, entries: Mapping[str, _Entry], size: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start or min(entry.shape, default=0) < 0:
            raise InputError(f"{path}: {name} has a byte range or a shape that cannot be")
        if entry.dtype in _DTYPES and stop - start != math.prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize:
            raise InputError(f"{path}: {name} has {stop - start} bytes, not those of {entry.dtype} {entry.shape}")
        end = stop
    if end != size:
        raise InputError(f"{path}: {size} bytes of tensors, where the header announces {end}: truncated or damaged")


def encode_header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str], *, align: int) -> bytes:
    """The start of a file of float32 tensors, up to the first one's bytes.

    Args:
        shapes: the tensors, in the order in which they will be written.
        metadata: string-to-string metadata.
        align: the first tensor starts at a multiple of so many bytes.
    """
    entries: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = _Entry("F32", list(shape), (start, end))
    header = msgspec.json.encode(entries)
    header += b" " * (-(_PREFIX + len(header)) % align)
    return len(header).to_bytes(_PREFIX, "little") + header
