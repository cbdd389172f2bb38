"""The MoE layers that transformers builds: `moe_layers.py FOLDER`.

Writes FOLDER/NAME/config.json for a small model of each architecture, and prints as JSON, for each NAME, the
hidden layers, the layers that hold experts, how many experts, and top-k.  No weights are made.
"""

import json
import re
import sys
from pathlib import Path

import torch
import transformers as hf

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GROUPED = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LOCAL = {"num_local_experts": 16, "num_experts_per_tok": 4}
NAMED = {"num_experts": 16, "num_experts_per_tok": 4}
CASES = {
    "mixtral": {**LOCAL},
    "olmoe": {**NAMED},
    "flex_olmo": {**NAMED},
    "gpt_oss": {**LOCAL},
    "phimoe": {**LOCAL},
    "granitemoe": {**LOCAL},
    "minimax": {**LOCAL},
    "minimax_m2": {**LOCAL},
    "qwen2_moe": {**NAMED, "decoder_sparse_step": 2},
    "qwen3_moe": {**NAMED, "mlp_only_layers": [0, 3]},
    "qwen3_next": {**NAMED, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "deepseek_v2": {**GROUPED, **LATENT, "first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": {**GROUPED, **LATENT, "first_k_dense_replace": 3},
    "deepseek_v32": {**GROUPED, **LATENT, "first_k_dense_replace": 2},
    "glm4_moe": {**GROUPED, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**GROUPED, **LATENT, "head_dim": 8},
    "glm_moe_dsa": {**GROUPED, **LATENT, "head_dim": 8},
    "dots1": {**GROUPED, "first_k_dense_replace": 2},
    "exaone_moe": {**NAMED, "first_k_dense_replace": 1},
    "afmoe": {**NAMED, "num_dense_layers": 2},
    "lfm2_moe": {**NAMED, "num_dense_layers": 2, "layer_types": ["conv", "full_attention"] * 3},
    "llama4_text": {**LOCAL, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64},
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 4, "moe_layer_start_index": 1, "moe_layer_interval": 2},
    "jamba": {**NAMED, "expert_layer_period": 2, "expert_layer_offset": 1},
    "gemma4_text": {"num_experts": 16, "top_k_experts": 4, "enable_moe_block": True},
    "qwen3_5_moe_text": {**NAMED},
}


def built(config: hf.PreTrainedConfig) -> list[object]:
    """Hidden layers, MoE layers and experts, of the modules themselves."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    experts = {}
    for name, module in model.named_modules():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(?:.*\.)?experts", name)
        if found:
            weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
            experts[int(found[1])] = weights[0].shape[0] if weights else len(module)
    (number,) = set(experts.values())
    return [len(model.model.layers), sorted(experts), number]


folder = Path(sys.argv[1])
report = {}
for name, fields in CASES.items():
    config = hf.AutoConfig.for_model(name, **{**SMALL, **fields})
    config.save_pretrained(folder / name)
    report[name] = [*built(config), fields.get("num_experts_per_tok") or fields.get("moe_k") or fields["top_k_experts"]]
print(json.dumps(report))
