"""What checkpoints choose, by their published rules: checkpoint_oracle.py TIE PROMPTS MAX_TOKENS OUT CHECKPOINT...

Greedy outputs come from whole forward passes without a KV cache.  One more pass over prompt and output gives
the routers' inputs; logits, choices and scores are computed from those with plain torch and the raw weights.
OUT/NAME.npz holds, of N prompts: `prompt`, `output` `[N, L, E]` counts; `prompt_near`, `output_near` `[N, L, E]`
experts within TIE of the other side of the top-k boundary; `ids` `[N, tokens, L, k]` of output tokens;
`prob`, `logit` `[N, L, E]` sums over the prompt; `lengths` `[N]` of prompts; `lead` `[N]`, by how much the
sampled tokens led the next best at least.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE = float(sys.argv[1])


def linear(router, hidden):
    return torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))


def gemma4_logits(router, hidden):
    """RMS norm without a scale, a learned scale, D^-1/2, then the projection."""
    normal = hidden / (hidden.pow(2).mean(-1, keepdim=True) + router.eps).sqrt()
    return (normal * router.scale * hidden.shape[-1] ** -0.5) @ router.proj.weight.T


def grouped(router, score):
    """DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): the best groups by their two best, then the best of those.

    Returns values to choose by, -inf outside the groups, and tokens at which groups tie.
    """
    biased = score + router.e_score_correction_bias
    groups = biased.unflatten(-1, (router.num_group, -1))
    of_group = groups.sort(-1, descending=True).values[..., :2].sum(-1)
    ordered = of_group.sort(-1, descending=True).values
    least = ordered[:, router.topk_group - 1, None]
    tied = least[:, 0] - ordered[:, router.topk_group] < TIE
    return groups.masked_fill((of_group < least)[..., None], float("-inf")).flatten(-2), tied


def route(name, router, hidden):
    """(logits, score, value to choose by, tied tokens), one row per token."""
    logits = gemma4_logits(router, hidden) if name == "gemma4" else linear(router, hidden)
    if name in ("deepseek_v3", "glm4_moe"):
        score = 1 / (1 + torch.exp(-logits))
        return logits, score, *grouped(router, score)
    score = torch.exp(logits - logits.logsumexp(-1, keepdim=True))
    return logits, score, logits, torch.zeros(len(logits), dtype=torch.bool)


def choose(value, tied, top_k):
    """Chosen experts `[T, E]`, those at a tie `[T, E]`, and ids `[T, k]` in rising order."""
    order = value.sort(-1, descending=True)
    inside, outside = order.values[:, top_k - 1, None], order.values[:, top_k, None]
    chosen = torch.zeros_like(value, dtype=torch.bool).scatter_(1, order.indices[:, :top_k], True)
    near = torch.where(chosen, value - outside < TIE, inside - value < TIE) | tied[:, None]
    return chosen, near, order.indices[:, :top_k].sort(-1).values


def routers_of(model):
    """Routers in model order, by the names that the published models give them."""
    found = []
    for layer in (getattr(model.model, "language_model", None) or model.model).layers:
        block = getattr(layer, "mlp", None) or getattr(layer, "block_sparse_moe", None)
        found += [m for m in (getattr(part, n, None) for part in (layer, block) for n in ("gate", "router")) if m]
    return found


def tokens_of(tokenizer, row):
    if "prompt" in row:
        return tokenizer(row["prompt"])["input_ids"]
    text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def whole(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def examine(name, model, routers, ids, split, top_k):
    """One text: everything of OUT for it."""
    inputs = []
    hooks = [router.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for router in routers]
    whole(model, ids)
    for hook in hooks:
        hook.remove()
    layers = []
    for router, hidden in zip(routers, inputs, strict=True):
        logits, score, value, tied = route(name, router, hidden.reshape(len(ids), -1))
        layers.append((*choose(value, tied, top_k), score, logits))
    chosen, near, chosen_ids, score, logits = (torch.stack(part, 1) for part in zip(*layers, strict=True))
    return {
        "prompt": chosen[:split].sum(0),
        "output": chosen[split:].sum(0),
        "prompt_near": near[:split].any(0),
        "output_near": near[split:].any(0),
        "ids": chosen_ids[split:],
        "prob": score[:split].double().sum(0),
        "logit": logits[:split].double().sum(0),
        "lengths": torch.tensor(split),
    }


def main(prompts, max_tokens, out, *folders):
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    for folder in map(Path, folders):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = model.config.get_text_config()
        top_k = getattr(config, "top_k_experts", None) or config.num_experts_per_tok
        texts = []
        for row in rows:
            ids = tokens_of(tokenizer, row)
            split = len(ids)
            lead = []
            for _ in range(int(max_tokens) - 1):
                best = whole(model, ids)[-1].topk(2)
                ids = [*ids, int(best.indices[0])]
                lead.append(best.values[0] - best.values[1])
            examined = examine(folder.name, model, routers_of(model), ids, split, top_k)
            texts.append({**examined, "lead": torch.stack(lead).min()})
        np.savez(
            Path(out) / f"{folder.name}.npz", **{k: np.stack([text[k].numpy() for text in texts]) for k in texts[0]}
        )


with torch.no_grad():
    main(*sys.argv[2:])
