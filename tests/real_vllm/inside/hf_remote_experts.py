"""Logits and greedy tokens of transformers with its own experts, and with those of servers; JSON."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from coterie.experts.client.model_experts import ExpertsConfig, remote_experts
from coterie.modeling.expert_tensors import read_expert_model
from coterie.transformers_experts import load_model


def batched(arguments):
    return zip(arguments[::2], arguments[1::2], strict=True)


def generate(model, prompts):
    made = [model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None) for ids in prompts]
    return [ids[0].tolist() for ids in made]


def compare(checkpoint, monitor):
    torch.manual_seed(3)
    prompts = [torch.randint(10, 50, (1, length)) for length in (1, 7, 40)]
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    known = read_expert_model(checkpoint)
    with remote_experts(checkpoint, ExpertsConfig(monitor, "transformers")) as experts, torch.inference_mode():
        remote = load_model(checkpoint, known, experts, timeout_s=30.0)
        differences = [
            (remote(ids).logits - stock(ids).logits).abs().max() / stock(ids).logits.abs().max() for ids in prompts
        ]
        same = generate(remote, prompts) == generate(stock, prompts)
    left = [name for name, _ in remote.named_parameters() if ".experts." in name]
    return {"same": same, "difference": max(differences).item(), "experts": left}


if __name__ == "__main__":
    print(json.dumps([compare(Path(checkpoint), monitor) for checkpoint, monitor in batched(sys.argv[1:])]))
