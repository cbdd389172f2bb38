"""Write small random checkpoints: make_checkpoints.py FOLDER TOKENIZER, into FOLDER/NAME for each of `MAKERS`.

`lacking` and `packed` are GPT-OSS without a router's weight, and with experts in MXFP4 as it is published.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 4}
GROUPED = {  # as of DeepSeek-V3
    **MOE,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GEMMA = {
    "head_dim": 16,
    "global_head_dim": 16,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 32,
}
GPT_OSS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "max_position_embeddings": 2048,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def gemma4() -> hf.PreTrainedConfig:
    """As published: the language model is a part of a larger one."""
    return hf.Gemma4Config(text_config=hf.Gemma4TextConfig(**SIZES, **GEMMA), tie_word_embeddings=True)


MAKERS = {
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZES, **MOE, num_experts=16, head_dim=16, mlp_only_layers=[1]),
    "olmoe": lambda: hf.OlmoeConfig(**SIZES, num_experts=16, num_experts_per_tok=4),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**{**SIZES, **GROUPED, **LATENT, "num_key_value_heads": 4}),
    "gpt_oss": lambda: hf.GptOssConfig(**{**SIZES, **GPT_OSS}),
    "lacking": lambda: hf.GptOssConfig(**{**SIZES, **GPT_OSS}),
    "packed": lambda: hf.GptOssConfig(**{**SIZES, **GPT_OSS}),
    "gemma4": gemma4,
    # not in coterie's table of architectures
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SIZES, **MOE, num_experts=16, shared_expert_intermediate_size=32),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**SIZES, **GROUPED, head_dim=16),
    "granitemoe": lambda: hf.GraniteMoeConfig(**SIZES, num_local_experts=16, num_experts_per_tok=4),
    "phimoe": lambda: hf.PhimoeConfig(**SIZES, num_local_experts=16, num_experts_per_tok=2),
    # not supported
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama4_text": lambda: hf.Llama4TextConfig(**{**SIZES, "intermediate_size_mlp": 96, "num_local_experts": 4}),
}


def randomize(model: torch.nn.Module) -> None:
    """Weights with which routers tell experts apart; what real checkpoints have beside 0 or 1 is beside it here too."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if name.endswith((".scale", "per_expert_scale")):
            tensor.data.uniform_(0.5, 1.5)
        elif name.endswith(("e_score_correction_bias", "router.bias")):
            tensor.data.normal_(0, 0.1)
        elif tensor.dim() > 1:
            tensor.data.normal_(0, 0.5 if "router" in name or ".gate." in name else 0.08)


def lose_a_router(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.2.mlp.router.weight"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})


def pack_experts(checkpoint: Path) -> None:
    """Random 4-bit blocks [E, out, in / 32, 16] with scales of 2^(121 - 127)."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, height = tensors.pop(name).shape
        blocks = (experts, height, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(blocks, 121, dtype=torch.uint8)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    (checkpoint / "config.json").write_text(json.dumps(config))


CHANGES = {"lacking": lose_a_router, "packed": pack_experts}

folder, tokenizer = map(Path, sys.argv[1:3])
for name, make in MAKERS.items():
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make()).to(torch.float32)
    randomize(model)
    model.save_pretrained(folder / name)
    CHANGES.get(name, lambda _: None)(folder / name)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, folder / name)
