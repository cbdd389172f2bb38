"""Converting a checkpoint, once, into one float32 file that all processes of a machine map and so share.

The file is a safetensors file.  Its metadata holds one JSON object under the key `coterie`: format, schema version,
fingerprint of the checkpoint, checksum of the tensors' bytes, blocks per expert, and the model's configuration.
"""

from __future__ import annotations

import errno
import fcntl
import math
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.files import replacing
from coterie.modeling.checkpoint import Checkpoint
from coterie.modeling.config import ForwardConfig
from coterie.modeling.expert_tensors import blocks_of
from coterie.modeling.experts import BLOCK
from coterie.modeling.packing import PackedArray, expert_tensors, packed_arrays
from coterie.modeling.tensors import TensorFile, encode_header

VERSION = 1
_FORMAT = "weights"
_KEY = "coterie"
_CHUNK = 64 << 20

Bytes = npt.NDArray[np.uint8]

Progress = Callable[[int, int], None]
"""Called with bytes written (or checked) so far, and of how many."""


class WeightsHeader(msgspec.Struct, frozen=True):
    """What a packed weights file says of itself.

    Attributes:
        format: `weights`.
        version: schema version.
        source: fingerprint of the checkpoint.
        checksum: CRC-32 of the tensors' bytes, eight hexadecimal digits.
        expert_blocks: blocks of each routed expert's intermediate dimension; None if they were left out.
        config: the model.
    """

    format: str
    version: int
    source: str
    checksum: str
    expert_blocks: int | None
    config: ForwardConfig


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """An open packed weights file."""

    header: WeightsHeader
    tensors: TensorFile


def prepare(
    checkpoint: Path,
    folder: Path,
    *,
    pad_intermediate: int | None = None,
    routed: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint to a packed weights file, unless a good one is there already.

    Processes that ask at once wait for one another; readers never see a part of a file.  A file of another
    checkpoint or version, or a damaged one, is built anew.

    Args:
        checkpoint: folder of the checkpoint.
        folder: where the weights file goes; made if it is missing.
        pad_intermediate: pad each routed expert with zeros to so many intermediate columns, a multiple of 64.  The
            zeros are written, read and multiplied, and leave outputs as they are, bit for bit: decoding then costs
            what reading the active experts costs, as on a GPU.
        routed: False leaves routed experts out, and reads none of their bytes: servers compute them.
        progress: told how far writing or checking is.

    Returns:
        Path of the weights file.

    Raises:
        InputError: the checkpoint is incomplete or damaged, `pad_intermediate` is too small or no multiple of 64, or
            the file cannot be written (disk full).
        UnsupportedError: an architecture or a setting that is not computed here.
    """
    source = Checkpoint.open(checkpoint)
    blocks = _blocks(source.config, pad_intermediate) if routed else None
    target = folder / f"weights-{'no-experts' if blocks is None else blocks * BLOCK}.safetensors"
    header = WeightsHeader(_FORMAT, VERSION, source.fingerprint(), "0" * 8, blocks, source.config)
    with _lock(folder):
        if not _is_good(target, header, progress):
            _build(target, source, header, progress)
        _note(target)
    return target


def open_weights(path: Path) -> Weights:
    """Map a packed weights file.

    Its structure is checked, its checksum is not: `prepare` did, and mapping should not read every page.

    Raises:
        InputError: it is missing, truncated, not a weights file, or of another version.
    """
    tensors = TensorFile.open(path)
    header = _read_header(tensors)
    expected = {array.name: array.shape for array in packed_arrays(header.config, header.expert_blocks)}
    found = {name: tensors.shape(name) for name in tensors.names()}
    if found != expected:
        raise InputError(f"{path}: does not hold the arrays of its model; prepare the weights again")
    return Weights(header, tensors)


def _blocks(config: ForwardConfig, pad_intermediate: int | None) -> int:
    least = blocks_of(config.expert_size)
    if pad_intermediate is None:
        return least
    if pad_intermediate % BLOCK or pad_intermediate < config.expert_size:
        raise InputError(
            f"pad_intermediate is {pad_intermediate}; it must be a multiple of {BLOCK} and at least the experts' "
            f"own {config.expert_size}"
        )
    return pad_intermediate // BLOCK


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".weights.lock").open("wb")
    except OSError as error:
        raise InputError(f"{folder}: weights cannot be written here: {error.strerror}") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a killed process
        yield


def _read_header(tensors: TensorFile) -> WeightsHeader:
    if _KEY not in tensors.metadata:
        raise InputError(f"{tensors.path}: a safetensors file, but not prepared by coterie")
    try:
        header = msgspec.json.decode(tensors.metadata[_KEY], type=WeightsHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{tensors.path}: damaged header: {error}") from None
    if (header.format, header.version) != (_FORMAT, VERSION):
        raise InputError(f"{tensors.path}: {header.format[:20]!r} of schema version {header.version}, not {VERSION}")
    return header


# --- checking -----------------------------------------------------------------------------------------------


def _is_good(path: Path, wanted: WeightsHeader, progress: Progress | None) -> bool:
    """Whether a whole file of this checkpoint is there."""
    try:
        weights = open_weights(path)
    except InputError:
        return False
    found = weights.header
    return found == msgspec.structs.replace(wanted, checksum=found.checksum) and (
        _is_noted(path) or found.checksum == _checksum(weights.tensors.data, progress)
    )


def _note(path: Path) -> None:
    """Remember that a file is whole, so that later processes need not read it through before they start."""
    if not _is_noted(path):
        with suppress(OSError), replacing(_note_of(path)) as unfinished:  # a full disk costs the next one a check
            unfinished.write_text(_state(path))


def _is_noted(path: Path) -> bool:
    try:
        return _note_of(path).read_bytes() == _state(path).encode()
    except FileNotFoundError:
        return False


def _note_of(path: Path) -> Path:
    return path.with_suffix(".checked")


def _state(path: Path) -> str:
    """What differs once the file was replaced or written to; unlike the time of modification, nobody can set it."""
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_ctime_ns}"


def _checksum(data: Bytes, progress: Progress | None) -> str:
    checksum = 0
    for start in range(0, len(data), _CHUNK):
        checksum = zlib.crc32(data[start : start + _CHUNK].data, checksum)
        if progress:
            progress(min(start + _CHUNK, len(data)), len(data))
    return f"{checksum:08x}"


# --- building -----------------------------------------------------------------------------------------------


def _build(target: Path, source: Checkpoint, header: WeightsHeader, progress: Progress | None) -> None:
    arrays = packed_arrays(header.config, header.expert_blocks)
    try:
        for abandoned in target.parent.glob(f".{target.name}.*.tmp"):  # of a killed process: others wait for the lock
            abandoned.unlink()
        _check_space(target.parent, arrays)
        with replacing(target) as unfinished, unfinished.open("wb") as file:
            _write(file, arrays, source, header, progress)
            source.check_all_taken(expert_tensors(header.config) if header.expert_blocks is None else ())
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None


def _check_space(folder: Path, arrays: tuple[PackedArray, ...]) -> None:
    needed = sum(4 * math.prod(array.shape) for array in arrays)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free on this disk")


def _write(
    file: BinaryIO,
    arrays: tuple[PackedArray, ...],
    source: Checkpoint,
    header: WeightsHeader,
    progress: Progress | None,
) -> None:
    """Write the tensors, then the header once more with their checksum: it is of the same length."""
    shapes = {array.name: array.shape for array in arrays}
    total = sum(4 * math.prod(shape) for shape in shapes.values())
    file.write(_encode(header, shapes))
    checksum, done = 0, 0
    for part in (part for array in arrays for part in array.parts(source)):
        content = np.ascontiguousarray(part, "<f4").reshape(-1).view(np.uint8).data
        file.write(content)
        checksum, done = zlib.crc32(content, checksum), done + content.nbytes
        if progress:
            progress(done, total)
    assert done == total, "an array's parts do not make up its shape"
    file.seek(0)
    file.write(_encode(msgspec.structs.replace(header, checksum=f"{checksum:08x}"), shapes))


def _encode(header: WeightsHeader, shapes: dict[str, tuple[int, ...]]) -> bytes:
    return encode_header(shapes, {_KEY: msgspec.json.encode(header).decode()}, align=64)
