"""What a forward pass needs to know of a model, read from its `config.json`.

Four architectures: Qwen3-MoE, Mixtral, OLMoE and DeepSeek-V3.  A setting that would change the outputs and is not
computed here is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from coterie.core import ModelGeometry
from coterie.errors import InputError, UnsupportedError
from coterie.model_config import ModelConfig, read_model_config
from coterie.modeling.gates import GateRule, SigmoidRule, SoftmaxRule
from coterie.modeling.rope import Rope, read_rope, yarn_scale

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class GroupedAttention(msgspec.Struct, frozen=True, tag="grouped"):
    """Attention in which groups of heads share keys and values.

    Attributes:
        kv_heads: heads of keys and values.
        head_dim: dimensions of every head.
        norm: RMS norm of queries and keys: none, of each head (Qwen3), or of all heads together (OLMoE).
        window: positions that a token sees, itself included; None for all.
    """

    kv_heads: int
    head_dim: int
    norm: str
    window: int | None


class LatentAttention(msgspec.Struct, frozen=True, tag="latent"):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        query_rank: rank of the queries' latent; None where queries are projected directly.
        kv_rank: rank of the latent of keys and values.
        nope_dim: dimensions of a head without position.
        rope_dim: dimensions with position, shared by the heads' keys.
        value_dim: dimensions of a head's values.
        interleaved: whether rotary pairs lie side by side in the checkpoint.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


class ForwardConfig(msgspec.Struct, frozen=True):
    """A model as a forward pass sees it.

    Attributes:
        architecture: `model_type`.
        layers: hidden layers.
        moe_layers: positions of the MoE layers among them, ascending.
        experts: routed experts of each MoE layer.
        vocab: tokens of the vocabulary.
        hidden: dimensions D of the residual stream.
        heads: query heads.
        attention: kind and sizes of attention.
        scale: factor of the attention scores.
        gate: how experts are chosen.
        expert_size: intermediate size of a routed expert.
        shared_size: intermediate size of the shared experts together; 0 without.
        dense_size: intermediate size of layers without experts.
        norm_eps: epsilon of the RMS norms.
        max_positions: positions the model was made for.
        rope: rotary embedding.
        tied: whether the output head is the embedding.
    """

    architecture: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    vocab: int
    hidden: int
    heads: int
    attention: GroupedAttention | LatentAttention
    scale: float
    gate: GateRule
    expert_size: int
    shared_size: int
    dense_size: int
    norm_eps: float
    max_positions: int
    rope: Rope
    tied: bool

    @property
    def geometry(self) -> ModelGeometry:
        """The routed part."""
        return ModelGeometry(len(self.moe_layers), self.experts, self.gate.top_k)


class _Common(msgspec.Struct):
    """Fields of all four, by the names of `config.json`."""

    vocab_size: Size
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    rms_norm_eps: float
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    quantization_config: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class _Grouped(_Common):
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None


class _Qwen3(_Grouped, kw_only=True):
    moe_intermediate_size: Size
    norm_topk_prob: bool
    use_sliding_window: bool = False


class _Mixtral(_Grouped):
    sliding_window: Size | None = None


class _Olmoe(_Grouped, kw_only=True):
    norm_topk_prob: bool
    clip_qkv: float | None = None


class _DeepseekV3(_Common, kw_only=True):
    moe_intermediate_size: Size
    n_shared_experts: int | None = None
    norm_topk_prob: bool
    n_group: Size | None = None
    topk_group: Size | None = None
    routed_scaling_factor: float
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    rope_interleave: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"


Fields = TypeVar("Fields", bound=_Common)


def read_forward_config(checkpoint: Path) -> ForwardConfig:
    """Read a checkpoint's `config.json`.

    Args:
        checkpoint: the folder that holds it.

    Raises:
        InputError: the file cannot be read, or a field is missing or wrong.
        UnsupportedError: an architecture or a setting that is not computed here.
    """
    model = read_model_config(checkpoint)
    reader = _READERS.get(model.architecture)
    if reader is None:
        raise UnsupportedError(
            f"{checkpoint}: architecture {model.architecture!r} is not computed by coterie; "
            f"{', '.join(sorted(_READERS))} are"
        )
    config = reader(checkpoint / "config.json", model)
    _check(checkpoint, config)
    return config


def _decode(file: Path, kind: type[Fields]) -> Fields:
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{file}: {error}") from None
    _refuse(file, "hidden_act", fields.hidden_act, fields.hidden_act != "silu")
    _refuse(file, "attention_bias", fields.attention_bias, fields.attention_bias)
    _refuse(file, "quantization_config", "set", fields.quantization_config is not None)
    return fields


def _refuse(file: Path, name: str, value: object, unsupported: bool) -> None:
    if unsupported:
        raise UnsupportedError(f"{file}: {name} is {value!r}, which coterie's own engine does not compute; use vLLM")


def _check(checkpoint: Path, config: ForwardConfig) -> None:
    """Sizes that must divide one another."""
    attention, gate = config.attention, config.gate
    if isinstance(attention, GroupedAttention) and config.heads % attention.kv_heads:
        raise InputError(f"{checkpoint}: {config.heads} heads do not share {attention.kv_heads} key heads evenly")
    if config.rope.dim % 2:
        raise InputError(f"{checkpoint}: {config.rope.dim} rotary dimensions are no pairs")
    if isinstance(gate, SigmoidRule):
        of_group = config.experts // gate.groups
        if config.experts % gate.groups or not gate.top_k <= gate.top_groups * of_group <= config.experts:
            raise InputError(
                f"{checkpoint}: top-{gate.top_k} of {config.experts} experts cannot be taken from "
                f"{gate.top_groups} of {gate.groups} groups"
            )
        if gate.top_groups < gate.groups and of_group < 2:
            raise InputError(f"{checkpoint}: n_group is {gate.groups}; a group needs two experts to be ranked by")


# --- the architectures --------------------------------------------------------------------------------------


def _forward(
    model: ModelConfig,
    fields: _Common,
    attention: GroupedAttention | LatentAttention,
    gate: GateRule,
    rope: Rope,
    *,
    expert_size: int,
    scale: float,
    shared_size: int = 0,
) -> ForwardConfig:
    return ForwardConfig(
        architecture=model.architecture,
        layers=model.hidden_layers,
        moe_layers=model.moe_layers,
        experts=model.geometry.experts,
        vocab=fields.vocab_size,
        hidden=fields.hidden_size,
        heads=fields.num_attention_heads,
        attention=attention,
        scale=scale,
        gate=gate,
        expert_size=expert_size,
        shared_size=shared_size,
        dense_size=fields.intermediate_size,
        norm_eps=fields.rms_norm_eps,
        max_positions=fields.max_position_embeddings,
        rope=rope,
        tied=fields.tie_word_embeddings,
    )


def _grouped(
    file: Path, model: ModelConfig, fields: _Grouped, expert_size: int, renormalise: bool, norm: str, window: int | None
) -> ForwardConfig:
    heads = fields.num_attention_heads
    head_dim = fields.head_dim or fields.hidden_size // heads
    attention = GroupedAttention(fields.num_key_value_heads or heads, head_dim, norm, window)
    gate = SoftmaxRule(model.geometry.top_k, renormalise)
    rope = _rope(file, fields, head_dim)
    return _forward(model, fields, attention, gate, rope, expert_size=expert_size, scale=head_dim**-0.5)


def _rope(file: Path, fields: _Common, dim: int) -> Rope:
    parameters = fields.rope_parameters or {**(fields.rope_scaling or {}), "rope_theta": fields.rope_theta}
    return read_rope(file, parameters, dim)


def _qwen3(file: Path, model: ModelConfig) -> ForwardConfig:
    fields = _decode(file, _Qwen3)
    _refuse(file, "use_sliding_window", fields.use_sliding_window, fields.use_sliding_window)
    return _grouped(file, model, fields, fields.moe_intermediate_size, fields.norm_topk_prob, "head", None)


def _mixtral(file: Path, model: ModelConfig) -> ForwardConfig:
    fields = _decode(file, _Mixtral)
    return _grouped(file, model, fields, fields.intermediate_size, True, "none", fields.sliding_window)


def _olmoe(file: Path, model: ModelConfig) -> ForwardConfig:
    fields = _decode(file, _Olmoe)
    _refuse(file, "clip_qkv", fields.clip_qkv, fields.clip_qkv is not None)
    return _grouped(file, model, fields, fields.intermediate_size, fields.norm_topk_prob, "full", None)


def _deepseek_v3(file: Path, model: ModelConfig) -> ForwardConfig:
    fields = _decode(file, _DeepseekV3)
    _refuse(file, "scoring_func", fields.scoring_func, fields.scoring_func != "sigmoid")
    _refuse(file, "topk_method", fields.topk_method, fields.topk_method != "noaux_tc")
    rope_dim, nope_dim = fields.qk_rope_head_dim, fields.qk_nope_head_dim
    attention = LatentAttention(
        fields.q_lora_rank, fields.kv_lora_rank, nope_dim, rope_dim, fields.v_head_dim, fields.rope_interleave
    )
    gate = SigmoidRule(
        model.geometry.top_k,
        fields.n_group or 1,
        fields.topk_group or 1,
        fields.norm_topk_prob,
        fields.routed_scaling_factor,
    )
    rope = _rope(file, fields, rope_dim)
    return _forward(
        model,
        fields,
        attention,
        gate,
        rope,
        expert_size=fields.moe_intermediate_size,
        shared_size=fields.moe_intermediate_size * (fields.n_shared_experts or 0),
        scale=(nope_dim + rope_dim) ** -0.5 * math.pow(yarn_scale(rope), 2),
    )


_READERS: dict[str, Callable[[Path, ModelConfig], ForwardConfig]] = {
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek_v3": _deepseek_v3,
}
