"""Record an activation trace of a checkpoint, many prompts at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from coterie.activations import ActivationTrace
from coterie.core import ModelGeometry, prompt_hash
from coterie.wire import Ids, count_ids
from tiny.model import Gates, watch_gates
from tiny.settings import END, TEMPERATURE

_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Expert ids of one request: `[tokens, L, k]` of its prompt and of its output."""

    prompt: Ids
    output: Ids


def record(
    name: str,
    folder: Path,
    prompts: Mapping[str, Sequence[str]],
    outputs: int,
    seed: int,
    report: Callable[[str], None],
) -> ActivationTrace:
    """Run every prompt through the checkpoint in `folder` and count `outputs` output tokens of each.

    Outputs are sampled at `TEMPERATURE`, since the greedy text of so small a model soon repeats itself, and never
    end early.  The checkpoint's own tokenizer reads the prompts, so their lengths may differ.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = list(chain.from_iterable(prompts.values()))
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    found: list[_Recorded] = []
    for start in range(0, len(texts), _TOGETHER):
        chance = torch.Generator().manual_seed(seed + start)
        found += _run(model.eval(), encoded[start : start + _TOGETHER], outputs, chance)
        report(f"{name}: recorded {len(found)} of {len(texts)} prompts")
    geometry = ModelGeometry(len(model.model.layers), model.config.num_experts, model.config.num_experts_per_tok)
    lengths = np.array([len(ids) for ids in encoded])
    return ActivationTrace(
        name,
        geometry,
        prefill=np.stack([count_ids(one.prompt, geometry.experts).astype(np.uint16) for one in found]),
        decode=np.stack([count_ids(one.output, geometry.experts) for one in found]),
        prefill_tokens=lengths,
        prefill_covered=lengths,
        decode_tokens=np.full(len(texts), outputs + 1),  # the last one sampled is never forwarded
        decode_covered=np.full(len(texts), outputs),
        prompt_hashes=tuple(map(prompt_hash, texts)),
        labels=tuple(domain for domain, some in prompts.items() for _ in some),
        decode_ids=np.concatenate([one.output for one in found]),
    )


def _run(
    model: Qwen3MoeForCausalLM, prompts: Sequence[Sequence[int]], outputs: int, chance: torch.Generator
) -> list[_Recorded]:
    """Prompts padded on the left, so that all of them end together."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[END] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    steps = []
    with torch.inference_mode(), watch_gates(model) as gates:
        done = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        of_prompts = _chosen(gates, len(prompts))
        for _ in range(outputs):
            ids = _sample(done.logits[:, -1], chance)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            done = model(ids, mask, position_ids=positions, past_key_values=done.past_key_values, use_cache=True)
            steps.append(_chosen(gates, len(prompts)))
    of_outputs = np.concatenate(steps, axis=1)
    return [
        _Recorded(of_prompts[i, longest - len(prompt) :], of_outputs[i]) for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def _chosen(gates: Gates, requests: int) -> Ids:
    """`[requests, tokens, L, k]` ids of the last forward pass, which are taken off the list."""
    layers = [chosen.reshape(requests, -1, chosen.shape[-1]) for _, chosen in gates]
    gates.clear()
    return torch.stack(layers, dim=2).to(torch.uint8).numpy()


def _sample(logits: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    logits[:, END] = -torch.inf
    return torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=chance)
