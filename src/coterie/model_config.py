"""Where a model's MoE layers are, by its `config.json`.

Stock engines return a row of expert ids for every hidden layer, dense ones included, and do not say which
are dense; the model's own configuration does.  Each architecture says it in its own fields, so only those
listed in `_LAYERS` are read; the tests compare them with the modules that transformers builds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from coterie.core import MAX_LAYERS, ModelGeometry
from coterie.errors import InputError, UnsupportedError

_MAX_BYTES = 16 << 20
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The hidden layers of a model and which of them are routed.

    Attributes:
        architecture: `model_type` of the language model, such as `qwen3_moe`.
        geometry: the MoE layers, their experts and top-k.
        hidden_layers: all hidden layers, dense ones included.
        moe_layers: positions of the MoE layers among them, ascending.
    """

    architecture: str
    geometry: ModelGeometry
    hidden_layers: int
    moe_layers: tuple[int, ...]


def read_model_config(path: Path) -> ModelConfig:
    """Read a model's `config.json`.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        InputError: the file cannot be read, or a field is missing or out of range.
        UnsupportedError: an architecture whose fields are not known, or a model without MoE layers.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise InputError(f"{file}: more than {_MAX_BYTES} bytes are no model configuration")
    try:
        config = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{file}: not a JSON object: {error}") from None
    text = config.get("text_config")  # models of several media nest the language model's part
    return _model_config(_Fields(text if isinstance(text, dict) else config, str(file)))


class _Fields:
    """A configuration whose fields are checked as they are read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is there."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not -1 <= value <= 1 << 20:
                raise InputError(f"{self.where}: {name} is {str(value)[:40]!r}, not a whole number in range")
            return value
        if default is None:
            raise InputError(f"{self.where}: there is no {' or '.join(names)}")
        return default

    def positive(self, *names: str, default: int | None = None) -> int:
        """As `number`, at least 1."""
        value = self.number(*names, default=default)
        if value < 1:
            raise InputError(f"{self.where}: {' or '.join(names)} is {value}, not at least 1")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where the field is missing or null."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, list) or any(type(item) is not int for item in value)):
            raise InputError(f"{self.where}: {name} is not a list of whole numbers")
        return value


def _model_config(fields: _Fields) -> ModelConfig:
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _LAYERS:
        raise UnsupportedError(_unknown(fields, model_type))
    hidden = fields.positive("num_hidden_layers")
    if hidden > MAX_LAYERS:
        raise InputError(f"{fields.where}: num_hidden_layers is {hidden}, more than {MAX_LAYERS}")
    layers = tuple(layer for layer in _LAYERS[model_type](fields, hidden) if 0 <= layer < hidden)
    if not layers:
        raise UnsupportedError(f"{fields.where}: the model has no MoE layer among its {hidden}")
    geometry = ModelGeometry(len(layers), fields.positive(*_EXPERTS), fields.positive(*_TOP_K))
    return ModelConfig(model_type, geometry, hidden, layers)


def _unknown(fields: _Fields, model_type: object) -> str:
    speaking = ("expert", "moe", "sparse", "dense")
    found = sorted(name for name in fields.values if any(word in name for word in speaking))
    return (
        f"{fields.where}: how model_type {str(model_type)[:40]!r} places its MoE layers is not known "
        f"(its fields about experts: {', '.join(found)[:300] or 'none'}); known are {', '.join(ARCHITECTURES)}. "
        "Collect with coterie's plugin in vLLM instead, which needs no configuration"
    )


# --- the architectures: MoE layers among `hidden`, by the fields that each has ------------------------------


def _every(fields: _Fields, hidden: int) -> Iterable[int]:
    return range(hidden)


def _every_if_enabled(fields: _Fields, hidden: int) -> Iterable[int]:
    return range(hidden if fields.values.get("enable_moe_block") is True else 0)


def _sparse_step(fields: _Fields, hidden: int) -> Iterable[int]:
    step, dense = fields.positive("decoder_sparse_step", default=1), fields.numbers("mlp_only_layers") or []
    return (layer for layer in range(hidden) if (layer + 1) % step == 0 and layer not in dense)


def _after_first_dense(fields: _Fields, hidden: int) -> Iterable[int]:
    first, step = fields.number("first_k_dense_replace"), fields.positive("moe_layer_freq", default=1)
    return (layer for layer in range(hidden) if layer >= first and layer % step == 0)


def _by_layer_types(fields: _Fields, hidden: int) -> Iterable[int]:
    """One word for each layer, as transformers 5 writes it; older files have the number of dense layers."""
    types = fields.values.get("mlp_layer_types")
    if types is None:
        return _after_first_dense(fields, hidden)
    if not isinstance(types, list) or len(types) != hidden or not set(map(str, types)) <= {"dense", "sparse"}:
        raise InputError(f'{fields.where}: mlp_layer_types is not "dense" or "sparse" for each of {hidden} layers')
    return (layer for layer, kind in enumerate(types) if kind == "sparse")


def _after_dense_layers(fields: _Fields, hidden: int) -> Iterable[int]:
    return range(fields.number("num_dense_layers"), hidden)


def _interleaved(fields: _Fields, hidden: int) -> Iterable[int]:
    listed = fields.numbers("moe_layers")
    step = fields.positive("interleave_moe_layer_step", default=1)
    return range(step - 1, hidden, step) if listed is None else sorted(set(listed))


def _in_range(fields: _Fields, hidden: int) -> Iterable[int]:
    first, last = fields.number("moe_layer_start_index"), fields.number("moe_layer_end_index", default=-1)
    step = fields.positive("moe_layer_interval", default=1)
    last = hidden - 1 if last == -1 else last
    return (layer for layer in range(hidden) if (layer + 1) % step == 0 and first <= layer <= last)


def _by_period(fields: _Fields, hidden: int) -> Iterable[int]:
    period, offset = fields.positive("expert_layer_period"), fields.number("expert_layer_offset")
    return (layer for layer in range(hidden) if layer % period == offset)


_LAYERS: dict[str, Callable[[_Fields, int], Iterable[int]]] = {
    **dict.fromkeys(
        ("mixtral", "olmoe", "flex_olmo", "gpt_oss", "phimoe", "granitemoe", "minimax", "minimax_m2"), _every
    ),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _every),
    **dict.fromkeys(("gemma4", "gemma4_text"), _every_if_enabled),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text"), _sparse_step),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "dots1"), _after_first_dense),
    **dict.fromkeys(("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "exaone_moe"), _by_layer_types),
    **dict.fromkeys(("afmoe", "lfm2_moe"), _after_dense_layers),
    **dict.fromkeys(("llama4", "llama4_text"), _interleaved),
    "ernie4_5_moe": _in_range,
    "jamba": _by_period,
}

ARCHITECTURES = tuple(sorted(_LAYERS))
"""The `model_type`s that are known."""
