"""The routed experts of a checkpoint one by one, without a byte of those that nobody asks for.

Architectures of `config`, and GPT-OSS, whose layers have one tensor for all experts: a place of its first axis is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.errors import InputError, UnsupportedError
from coterie.model_config import read_model_config
from coterie.modeling.checkpoint import file_of, open_files
from coterie.modeling.experts import BLOCK, EXPERT_ROWS, Bounded, ExpertWeights, block_biases, block_expert
from coterie.modeling.tensors import TensorFile
from coterie.modeling.tiles import Floats, Shape

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]

_EXPERTS = ".experts."
_GPT_OSS = "gpt_oss"
_SIZES = {
    "qwen3_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "olmoe": "intermediate_size",
    "deepseek_v3": "moe_intermediate_size",
    _GPT_OSS: "intermediate_size",
}
"""The field of `config.json` with an expert's intermediate size, by architecture."""
_SLOPE = 1.702  # transformers, modeling_gpt_oss.py: `GptOssExperts.alpha`; no field of config.json has it
_MX_BLOCK = 32  # values that share a scale, two to a byte
_MX_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""E2M1, by its four bits: sign, exponent, mantissa (OCP Microscaling Formats 1.0, section 5.3.3)."""
FINGERPRINT_BYTES = 16
_SAMPLES = 127  # a prime, so that what is chosen evenly among all tensors is not of one kind of projection
_SAMPLE_BYTES = 1024


class _Fields(msgspec.Struct):
    hidden_size: Size
    intermediate_size: Size
    moe_intermediate_size: Size | None = None
    hidden_act: str = "silu"
    swiglu_limit: float = 7.0
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """What a model's routed experts are.

    Attributes:
        architecture: `model_type`.
        geometry: MoE layers, experts, top-k.
        moe_layers: positions of the MoE layers among the hidden layers.
        hidden: dimensions D of the residual stream.
        size: intermediate size I.
        bounds: slope and limit, of experts that have biases and bounds; see `experts`.
        mxfp4: whether their matrices are stored in four bits.
    """

    architecture: str
    geometry: ModelGeometry
    moe_layers: tuple[int, ...]
    hidden: int
    size: int
    bounds: tuple[float, float] | None
    mxfp4: bool

    @property
    def blocks(self) -> int:
        """Blocks of the intermediate dimension."""
        return blocks_of(self.size)

    def shapes(self) -> tuple[Shape, Shape]:
        """The two products of an expert's tile."""
        return (EXPERT_ROWS, self.hidden, 2 * BLOCK), (EXPERT_ROWS, BLOCK, self.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """One expert, float32.

    Attributes:
        gate: `[I, D]`.
        up: `[I, D]`.
        down: `[D, I]`.
        biases: `[I]`, `[I]` and `[D]` of the three, where there are any.
    """

    gate: Floats
    up: Floats
    down: Floats
    biases: tuple[Floats, Floats, Floats] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertFiles:
    """A checkpoint's files, as a source of experts."""

    folder: Path
    model: ExpertModel
    _files: Mapping[str, TensorFile]

    @classmethod
    def open(cls, folder: Path) -> ExpertFiles:
        """Open a checkpoint's files and read its configuration.

        Raises:
            InputError: a file is missing or damaged, or a field is missing or wrong.
            UnsupportedError: an architecture or a setting whose experts are not computed here.
        """
        return cls(folder, read_expert_model(folder), open_files(folder))

    def expert(self, layer: int, expert: int) -> Expert:
        """Read one expert.

        Args:
            layer: MoE layer, from 0.
            expert: of it.

        Raises:
            InputError: a tensor is missing, or of another shape or dtype than the configuration makes it.
        """
        if self.model.architecture == _GPT_OSS:
            return self._of_stack(f"{moe_block(_GPT_OSS, self.model.moe_layers[layer])}.experts", expert)
        names = expert_names(self.model.architecture, self.model.moe_layers[layer], expert)
        inward, outward = (self.model.size, self.model.hidden), (self.model.hidden, self.model.size)
        gate, up, down = (
            self._file(name, *shape).floats(name) for name, shape in zip(names, (inward, inward, outward), strict=True)
        )
        return Expert(gate, up, down)

    def fingerprint(self) -> str:
        """What these experts are known by, wherever their files lie and however they are cut; 32 hexadecimal digits.

        It is a digest of what a server computes by: fields of the configuration, each expert tensor's name, dtype and
        shape, and a sample of their bytes, 1 KiB in the middle of 127 tensors at most, so that it costs the same for
        any size.  A change to a few experts alone may go unnoticed.

        Raises:
            InputError: the checkpoint has no routed experts.
        """
        model, names = self.model, self._names()
        fields = model.architecture, model.moe_layers, model.geometry.experts, model.hidden, model.size
        digest = hashlib.blake2b(
            msgspec.json.encode((*fields, model.bounds, model.mxfp4)), digest_size=FINGERPRINT_BYTES
        )
        for name in names:
            digest.update(f"\n{name} {self._files[name].dtype(name)} {self._files[name].shape(name)}".encode())
        count = min(len(names), _SAMPLES)
        for place in range(count):
            name = names[place * len(names) // count]
            content = self._files[name].raw(name).data
            first = max(0, len(content) - _SAMPLE_BYTES) // 2
            digest.update(content[first : first + _SAMPLE_BYTES])
        return digest.hexdigest()

    def _names(self) -> list[str]:
        """Names of all tensors of routed experts."""
        blocks = {moe_block(self.model.architecture, layer) for layer in self.model.moe_layers}
        names = sorted(name for name in self._files if name.partition(_EXPERTS)[0] in blocks and _EXPERTS in name)
        if not names:
            raise InputError(
                f"{self.folder}: the checkpoint has no routed experts, by which clients and servers know each other; "
                "a client needs its whole model's files, though it reads next to nothing of the experts"
            )
        return names

    def _of_stack(self, source: str, expert: int) -> Expert:
        """Of tensors `[E, ..]` in which gates and ups take turns."""
        size, hidden = self.model.size, self.model.hidden
        inward_bias = self._place(f"{source}.gate_up_proj_bias", expert, 2 * size)
        outward_bias = self._place(f"{source}.down_proj_bias", expert, hidden)
        inward = self._matrix(f"{source}.gate_up_proj", expert, 2 * size, hidden)
        outward = self._matrix(f"{source}.down_proj", expert, hidden, size)
        biases = inward_bias[0::2], inward_bias[1::2], outward_bias
        return Expert(inward[0::2], inward[1::2], outward, biases)

    def _matrix(self, name: str, expert: int, rows: int, columns: int) -> Floats:
        """`[rows, columns]`, a row for each output; stored so in four bits, else the other way round."""
        if not self.model.mxfp4:
            return self._place(name, expert, columns, rows).T
        groups, experts = columns // _MX_BLOCK, self.model.geometry.experts
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        codes = self._file(blocks, experts, rows, groups, _MX_BLOCK // 2).codes(blocks, expert)
        return from_mxfp4(codes, self._file(scales, experts, rows, groups).codes(scales, expert))

    def _place(self, name: str, expert: int, *shape: int) -> Floats:
        return self._file(name, self.model.geometry.experts, *shape).floats(name, expert)

    def _file(self, name: str, *shape: int) -> TensorFile:
        return file_of(self.folder, self._files, name, shape)


def read_expert_model(checkpoint: Path) -> ExpertModel:
    """Read what `config.json` says of the routed experts.

    Raises:
        InputError: the file cannot be read, or a field is missing or wrong.
        UnsupportedError: an architecture or a setting whose experts are not computed here.
    """
    found, file = read_model_config(checkpoint), checkpoint / "config.json"
    if found.architecture not in _SIZES:
        known = ", ".join(sorted(_SIZES))
        raise UnsupportedError(f"{file}: coterie does not compute experts of {found.architecture!r}, but of {known}")
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=_Fields)
    except msgspec.ValidationError as error:
        raise InputError(f"{file}: {error}") from None
    size = getattr(fields, _SIZES[found.architecture])
    if size is None:
        raise InputError(f"{file}: there is no {_SIZES[found.architecture]}")
    gpt_oss = found.architecture == _GPT_OSS
    mxfp4 = gpt_oss and (fields.quantization_config or {}).get("quant_method") == "mxfp4"
    _check(file, fields, size, mxfp4=mxfp4)
    bounds = (_SLOPE, fields.swiglu_limit) if gpt_oss else None
    return ExpertModel(found.architecture, found.geometry, found.moe_layers, fields.hidden_size, size, bounds, mxfp4)


def _check(file: Path, fields: _Fields, size: int, *, mxfp4: bool) -> None:
    if fields.hidden_act != "silu":
        raise UnsupportedError(f"{file}: hidden_act is {fields.hidden_act!r}; coterie computes experts with silu")
    if fields.quantization_config is not None and not mxfp4:
        raise UnsupportedError(f"{file}: quantization_config is set; coterie reads no quantised experts of this model")
    if mxfp4 and (fields.hidden_size % _MX_BLOCK or size % _MX_BLOCK):
        raise InputError(
            f"{file}: hidden size {fields.hidden_size} or expert size {size} is no multiple of {_MX_BLOCK}"
        )
    if not fields.swiglu_limit > 0:
        raise InputError(f"{file}: swiglu_limit is {fields.swiglu_limit}; it must be positive")


def pack_experts(model: ExpertModel, count: int, experts: Iterable[Expert]) -> ExpertWeights:
    """Stack so many experts for a kernel, in the order given; they are taken one after the other."""
    blocks, hidden = model.blocks, model.hidden
    gate_up = np.empty((count, blocks, hidden, 2 * BLOCK), np.float32)
    down = np.empty((count, blocks, BLOCK, hidden), np.float32)
    bounded = None
    if model.bounds is not None:
        inward, outward = np.empty((count, blocks, 2 * BLOCK), np.float32), np.empty((count, hidden), np.float32)
        bounded = Bounded(inward, outward, *model.bounds)
    for place, expert in zip(range(count), experts, strict=True):
        gate_up[place], down[place] = block_expert(expert.gate, expert.up, expert.down, blocks)
        if bounded is not None and expert.biases is not None:
            gate, up, bounded.down[place] = expert.biases
            bounded.gate_up[place] = block_biases(gate, up, blocks)
    return ExpertWeights(gate_up, down, bounded)


def from_mxfp4(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Floats:
    """Values of groups of four-bit floats, each group with a power of two (OCP Microscaling Formats 1.0, MXFP4).

    Args:
        codes: `[.., G, B]`, two values to a byte, the lower half first.
        scales: `[.., G]` exponents plus 127.

    Returns:
        `[.., G * B * 2]`.
    """
    values = np.stack((_MX_VALUES[codes & 15], _MX_VALUES[codes >> 4]), axis=-1)
    scaled: Floats = np.ldexp(values.reshape(*codes.shape[:-1], -1), scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*codes.shape[:-2], -1)


# --- names, shared with `packing` ---------------------------------------------------------------------------


def blocks_of(size: int) -> int:
    """Blocks of an intermediate dimension."""
    return -(-size // BLOCK)


def moe_block(architecture: str, layer: int) -> str:
    """What the names of a hidden layer's gate and experts begin with."""
    return f"model.layers.{layer}.{'block_sparse_moe' if architecture == 'mixtral' else 'mlp'}"


def expert_names(architecture: str, layer: int, expert: int) -> tuple[str, str, str]:
    """Names of an expert's gate, up and down projections, in a hidden layer."""
    source = f"{moe_block(architecture, layer)}.experts.{expert}"
    if architecture == "mixtral":
        return f"{source}.w1.weight", f"{source}.w3.weight", f"{source}.w2.weight"
    return projections(source)


def projections(source: str) -> tuple[str, str, str]:
    """Names of a feed-forward's gate, up and down projections."""
    return f"{source}.gate_proj.weight", f"{source}.up_proj.weight", f"{source}.down_proj.weight"
