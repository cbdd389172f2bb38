"""A checkpoint as published: a folder with `config.json` and one safetensors file, or several with an index."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from coterie.errors import InputError
from coterie.modeling.config import ForwardConfig, read_forward_config
from coterie.modeling.tensors import TensorFile
from coterie.modeling.tiles import Floats

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        folder: where it lies.
        config: what a forward pass needs to know of it.
        taken: names of the tensors read so far.
    """

    folder: Path
    config: ForwardConfig
    _files: Mapping[str, TensorFile]
    taken: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint's files and read its configuration.

        Raises:
            InputError: a file is missing or damaged, or the index names a file outside the folder.
            UnsupportedError: an architecture or a setting that is not computed here.
        """
        return cls(folder, read_forward_config(folder), open_files(folder))

    def tensor(self, name: str, *shape: int) -> Floats:
        """A tensor as float32.

        Raises:
            InputError: it is missing, or of another shape or dtype.
        """
        file = file_of(self.folder, self._files, name, shape)
        self.taken.add(name)
        return file.floats(name)

    def check_all_taken(self, left_out: Iterable[str] = ()) -> None:
        """Check that no tensor was left that might belong to the outputs, but for those that were left out knowingly.

        Left alone are the layers after the last (those that DeepSeek-V3 adds for multi-token prediction), the
        output head where it is the embedding, and rotary frequencies, which are computed.

        Raises:
            InputError: naming tensors that the forward pass knows nothing of.
        """
        others = self._files.keys() - self.taken - set(left_out)
        left = sorted(name for name in others if not self._is_spare(name))
        if left:
            raise InputError(
                f"{self.folder}: {len(left)} tensors have no place in {self.config.architecture}: "
                f"{', '.join(left)[:300]}"
            )

    def _is_spare(self, name: str) -> bool:
        layer = _LAYER.match(name)
        beyond = layer is not None and int(layer[1]) >= self.config.layers
        return beyond or name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")

    def fingerprint(self) -> str:
        """Identity of these very files: configuration, and each file's name, size, time of change and header.

        A copy has another one; what experts are known by on all hosts is `ExpertFiles.fingerprint`.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for file in sorted(set(self._files.values()), key=lambda file: file.path):
            status = file.path.stat()
            digest.update(f"\n{file.path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
            digest.update(file.header)
        return digest.hexdigest()


def open_files(folder: Path) -> Mapping[str, TensorFile]:
    """The file of each tensor of a checkpoint; nothing but the files' headers is read.

    Raises:
        InputError: a file is missing or damaged, or the index names a file outside the folder.
    """
    shards = _read_index(folder) if (folder / _INDEX).exists() else [_SINGLE]
    files = [TensorFile.open(folder / shard) for shard in shards]
    return {name: file for file in files for name in file.names()}


def file_of(folder: Path, files: Mapping[str, TensorFile], name: str, shape: tuple[int, ...]) -> TensorFile:
    """The file of a tensor that must be of this shape.

    Raises:
        InputError: it is missing, or of another shape.
    """
    if name not in files:
        raise InputError(f"{folder}: the checkpoint has no tensor {name}")
    if (found := files[name].shape(name)) != shape:
        raise InputError(f"{folder}: {name} is of shape {found}; its config.json makes it {shape}")
    return files[name]


def _read_index(folder: Path) -> list[str]:
    path = folder / _INDEX
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise InputError(f"{path}: more than {_MAX_INDEX_BYTES} bytes are no index")
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: not an index of safetensors files: {error}") from None
    shards = sorted(set(index.weight_map.values()))
    for shard in shards:
        if not shard or Path(shard).name != shard:
            raise InputError(f"{path}: names {shard[:80]!r}, which is not a file of its folder")
    return shards
