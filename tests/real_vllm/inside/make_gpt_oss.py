"""Write a small random GPT-OSS checkpoint: make_gpt_oss.py FOLDER."""

import sys

import torch
from transformers import GptOssConfig, GptOssForCausalLM

torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=16,
    num_experts_per_tok=2,
    sliding_window=64,
    max_position_embeddings=2048,
    layer_types=["sliding_attention", "full_attention"] * 2,
    eos_token_id=0,
    pad_token_id=0,
)
model = GptOssForCausalLM(config).to(torch.float32)
for name, parameter in model.named_parameters():
    if parameter.dim() > 1:
        parameter.data.normal_(0, 0.5 if "router" in name else 0.08)
model.save_pretrained(sys.argv[1])
