"""Files of arrays: safetensors with one JSON header, written atomically and read with suspicion.

The header sits in the metadata under one key, so that equal contents give equal bytes:

    {"coterie": '{"format": "trace", "version": 1, "header": {...}}'}

Nothing is unpickled.  A file is refused by its size before it is read, and the arrays it announces must
fill it exactly, so reading costs no more memory than the file has bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coterie.errors import InputError
from coterie.files import replacing

_KEY = "coterie"
_DTYPES = {"U8", "U16", "U32", "I64", "F32"}
_LOOK_BYTES = 1024

Array = npt.NDArray[Any]
Header = TypeVar("Header", bound=msgspec.Struct)


class _Envelope(msgspec.Struct):
    format: str
    version: int
    header: msgspec.Raw


@dataclass(frozen=True, slots=True)
class TensorFormat(Generic[Header]):
    """One kind of file.

    Attributes:
        name: what the file holds; written into it.
        version: version of its schema; files of another one are refused.
        header: type of its JSON header.
        required: names of the arrays it must hold.
        optional: names of the arrays it may hold besides.
        most_bytes: size above which a file is not opened.
        error: exception that is raised for a bad file.
        remedy: what to do about a bad file; ends each message.
    """

    name: str
    version: int
    header: type[Header]
    required: frozenset[str]
    optional: frozenset[str]
    most_bytes: int
    error: type[InputError]
    remedy: str

    def write(self, path: str | os.PathLike[str], header: Header, arrays: Mapping[str, Array]) -> None:
        """Write a file, or leave what is there untouched: readers never see a part of it.

        Raises:
            InputError: (the format's `error`) the file cannot be written.
        """
        target = Path(path)
        envelope = _Envelope(self.name, self.version, msgspec.Raw(msgspec.json.encode(header)))
        metadata = {_KEY: msgspec.json.encode(envelope).decode()}
        try:
            with replacing(target) as unfinished:
                unfinished.touch()
                mode = unfinished.stat().st_mode  # safetensors makes files that only their owner may read
                save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, unfinished, metadata)
                unfinished.chmod(mode)
        except OSError as error:
            raise self.error(f"{target}: cannot be written: {error.strerror or error}") from None
        except (SafetensorError, InputError) as error:
            raise self.error(f"{target}: cannot be written: {error}") from None

    def read(self, path: str | os.PathLike[str]) -> tuple[Header, dict[str, Array]]:
        """Read a file's header and arrays.

        Raises:
            InputError: (the format's `error`) the file is missing, too large, truncated, alien or of another
                version, or holds other arrays than the format names.
        """
        try:
            self._check_size(Path(path))
            with safe_open(path, framework="np") as file:
                header = self._read_header(file.metadata())
                self._check_names(set(file.keys()))
                return header, {name: self._read_array(file, name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise self.failure(path, f"cannot be read: {error.strerror or error}") from None
        except SafetensorError as error:
            alien = _seems_to_be(Path(path))
            problem = f"{alien}, not a {self.name}" if alien else f"truncated or not a safetensors file: {error}"
            raise self.failure(path, problem) from None
        except InputError as error:
            raise self.failure(path, error) from None

    def failure(self, path: str | os.PathLike[str], problem: object) -> InputError:
        """The exception for a bad file: its path, the problem and the remedy."""
        return self.error(f"{os.fspath(path)}: {problem}; {self.remedy}")

    def _check_size(self, path: Path) -> None:
        size = path.stat().st_size
        if not path.is_file():
            raise InputError("not a regular file")  # a pipe would be waited for, a device read without end
        if size > self.most_bytes:
            raise InputError(f"{size} bytes, more than the {self.most_bytes} that a {self.name} may have")

    def _read_header(self, metadata: Mapping[str, str] | None) -> Header:
        if not metadata or _KEY not in metadata:
            raise InputError(f"a safetensors file, but not a {self.name} of coterie")
        try:
            envelope = msgspec.json.decode(metadata[_KEY], type=_Envelope)
            if envelope.format != self.name:
                raise InputError(f"holds a {_brief(envelope.format)}, not a {self.name}")
            if envelope.version != self.version:
                raise InputError(
                    f"a {self.name} of schema version {envelope.version}; this release reads {self.version}"
                )
            return msgspec.json.decode(envelope.header, type=self.header)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InputError(f"damaged header: {error}") from None

    def _check_names(self, names: set[str]) -> None:
        if missing := self.required - names:
            raise InputError(f"lacks {', '.join(sorted(missing))}")
        if unknown := names - self.required - self.optional:
            raise InputError(f"holds unknown arrays: {_brief(', '.join(sorted(unknown)))}")

    def _read_array(self, file: Any, name: str) -> Array:
        dtype = file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise InputError(f"{name} is of dtype {dtype}, which no {self.name} uses")
        array: Array = file.get_tensor(name)
        return array


def format_of(path: str | os.PathLike[str]) -> str | None:
    """Name of the format that a file says it has; None where it says none, or cannot be read."""
    try:
        if not Path(path).is_file():
            return None
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            return msgspec.json.decode(metadata.get(_KEY, ""), type=_Envelope).format
    except (OSError, SafetensorError, msgspec.DecodeError, RecursionError):
        return None


def _seems_to_be(path: Path) -> str | None:
    """What else that coterie reads or writes a file is; None where it is nothing of that."""
    with path.open("rb") as file:
        begin = file.read(_LOOK_BYTES)
    if b"\0" in begin:  # a safetensors file has zeros in its first eight bytes, the header's length
        return None
    if begin.startswith(b'{"model":') and b'"records":' in begin:  # see `calibration.journal`
        return "an unfinished collection, which goes on when its command is run again"
    if begin.lstrip().startswith((b"{", b"[")):
        return "JSON, such as a prompt file"
    return None


def _brief(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
