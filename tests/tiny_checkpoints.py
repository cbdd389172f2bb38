"""Small random checkpoints of each architecture, written without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "head_dim": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "num_key_value_heads": 4},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
ARCHITECTURES = tuple(CONFIGS)


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """A configuration as `config.json` holds it; a change to None takes the field out."""
    merged = {"model_type": architecture, **COMMON, **CONFIGS[architecture], **changes}
    return {name: value for name, value in merged.items() if value is not None}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, as the architectures publish them."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        attention = _latent(config) if config["model_type"] == "deepseek_v3" else _grouped(config)
        shapes |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{prefix}.{name}": shape for name, shape in _feed_forward(config, layer).items()}
    return shapes


def _grouped(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    norms = {"qwen3_moe": (head_dim, head_dim), "olmoe": (queries, keys)}.get(config["model_type"])
    shapes = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes["o_proj"] = (hidden, queries)
    return shapes if norms is None else {**shapes, "q_norm": norms[:1], "k_norm": norms[1:]}


def _latent(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query = config.get("q_lora_rank")
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (hidden, heads * value),
    }
    if query is None:
        return {**shapes, "q_proj": (heads * (nope + rope), hidden)}
    return {
        **shapes,
        "q_a_proj": (query, hidden),
        "q_a_layernorm": (query,),
        "q_b_proj": (heads * (nope + rope), query),
    }


def _feed_forward(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, kind = config["hidden_size"], config["model_type"]
    own = config.get("moe_intermediate_size", config["intermediate_size"])
    if layer < config.get("first_k_dense_replace", 0) or layer in config.get("mlp_only_layers", []):
        return _projections("mlp", ("gate_proj", "up_proj", "down_proj"), hidden, config["intermediate_size"])
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    experts = config.get("n_routed_experts") or config.get("num_experts") or config["num_local_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{block}.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _projections(f"{block}.experts.{expert}", names, hidden, own)
    if kind == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
        shapes |= _projections("mlp.shared_experts", names, hidden, own * config["n_shared_experts"])
    return shapes


def _projections(prefix: str, names: tuple[str, ...], hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (size, hidden), up: (size, hidden), down: (hidden, size)}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights with which routers tell experts apart."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        scale = 0.5 if ".gate.weight" in name else 0.2
        center = 1.0 if name.endswith("norm.weight") else 0.0
        tensors[name] = (center + scale * rng.standard_normal(shape)).astype(np.float32)
    return tensors


def write_checkpoint(folder: Path, architecture: str, **changes: Any) -> Path:
    """Write a random checkpoint: `config.json` and `model.safetensors`."""
    config = config_of(architecture, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), folder / "model.safetensors")
    return folder
