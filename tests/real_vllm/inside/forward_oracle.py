"""What transformers computes of checkpoints: forward_oracle.py OUT LENGTHS ROWS OUTPUT CHECKPOINT...

For each checkpoint, OUT/NAME.npz holds, of prompts of random tokens (one of each of the comma-separated LENGTHS):
`prompt_I [T]`; `logits_I [ROWS, V]` of its last tokens; `gates_I [T, L, E]` router logits; `outputs_I [OUTPUT]` greedy
tokens, each from a whole pass without a cache.

tests/fixtures/coterie-tiny-forward.npz is `forward_oracle.py . 70,9 2 32 models/coterie-tiny`, renamed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def gate_logits(model, ids):
    """Logits `[T, V]` and router logits `[T, L, E]` of one text."""
    gates = []
    routers = [getattr(layer.mlp, "gate", None) for layer in model.model.layers]
    hooks = [r.register_forward_hook(lambda _m, _i, output: gates.append(output[0])) for r in routers if r is not None]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack([gate.reshape(len(ids), -1) for gate in gates], 1)


def greedy(model, ids, count):
    for _ in range(count):
        ids = [
            *ids,
            int(model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].argmax()),
        ]
    return ids[-count:]


def main(out, lengths, rows, output, *folders):
    for folder in map(Path, folders):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        rng = np.random.default_rng(0)
        found = {}
        for number, length in enumerate(map(int, lengths.split(","))):
            ids = rng.integers(1, model.config.vocab_size, length).tolist()
            logits, gates = gate_logits(model, ids)
            outputs = greedy(model, ids, int(output))
            parts = {"prompt": ids, "logits": logits[-int(rows) :], "gates": gates, "outputs": outputs}
            found |= {f"{part}_{number}": np.asarray(values) for part, values in parts.items()}
        np.savez_compressed(Path(out) / f"{folder.name}.npz", **found)


with torch.no_grad():
    main(*sys.argv[1:])
