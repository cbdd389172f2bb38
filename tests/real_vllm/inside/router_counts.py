"""Expert counts by transformers: `router_counts.py MODEL IDS.json OUT.npz`.

IDS.json holds a list of token id lists.  OUT.npz holds `counts [N, L, E]` and `near [N, L, E]`: experts for
which some token of the text had a gate logit closer than 1e-3 to that of the expert on the other side of the
top-k boundary, so that another summation order may have chosen differently.  `ids [T, L, top_k]` and
`token_near [T, L, E]` say the same of each token, text after text.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TIE = 1e-3

folder, ids_file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
config = model.config
experts = getattr(config, "num_experts", None) or config.num_local_experts
top_k = config.num_experts_per_tok
inputs: list[torch.Tensor] = []
gates = [m for n, m in model.named_modules() if n.endswith((".mlp.gate", ".mlp.router"))]
assert len(gates) == config.num_hidden_layers
for gate in gates:
    gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))

counts, near, all_ids, token_near = [], [], [], []
for ids in json.loads(Path(ids_file).read_text()):
    inputs.clear()
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    text_ids, text_near = [], []
    for gate, hidden in zip(gates, inputs, strict=True):
        logits = torch.nn.functional.linear(hidden.reshape(len(ids), -1), gate.weight, getattr(gate, "bias", None))
        order = logits.sort(-1, descending=True)
        chosen = order.indices[:, :top_k]
        counts.append(torch.bincount(chosen.reshape(-1), minlength=experts).numpy())
        inside, outside = order.values[:, top_k - 1 : top_k], order.values[:, top_k : top_k + 1]
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
        close = torch.where(is_chosen, logits - outside < TIE, inside - logits < TIE)
        near.append(close.any(0).numpy())
        text_ids.append(chosen.numpy())
        text_near.append(close.numpy())
    all_ids.append(np.stack(text_ids, axis=1))
    token_near.append(np.stack(text_near, axis=1))
shape = (-1, len(gates), experts)
np.savez(
    out,
    counts=np.stack(counts).reshape(shape),
    near=np.stack(near).reshape(shape),
    ids=np.concatenate(all_ids),
    token_near=np.concatenate(token_near),
)
