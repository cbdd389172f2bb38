"""Compare expert kernels on random experts, with one another and with transformers; prints relative errors as JSON."""

import json
from itertools import product

import numpy as np
import torch
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from coterie.core import ModelGeometry
from coterie.experts.server.kernels import ModelingKernel
from coterie.experts.server.vllm_kernel import VllmKernel
from coterie.experts.torch.kernel import TorchKernel
from coterie.modeling.expert_tensors import Expert, ExpertModel, from_mxfp4

EXPERTS, HIDDEN, SIZE, TOP_K, TOKENS = 6, 96, 84, 3, 50  # sizes that both kernels fill up
KERNELS = {"vllm": VllmKernel, "torch": lambda dtype: TorchKernel("cpu", getattr(torch, dtype))}
rng = np.random.default_rng(0)


def normal(*shape):
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)


def random_expert(bounded):
    biases = (normal(SIZE), normal(SIZE), normal(HIDDEN)) if bounded else None
    return Expert(normal(SIZE, HIDDEN), normal(SIZE, HIDDEN), normal(HIDDEN, SIZE), biases)


def error(got, wanted):
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def by_transformers(experts, rows, ids, router):
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=SIZE, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    module = GptOssExperts(config)
    turns = [np.stack((e.gate, e.up), axis=1).reshape(2 * SIZE, HIDDEN) for e in experts]
    bias_turns = [np.stack(e.biases[:2], axis=1).ravel() for e in experts]
    state = {
        "gate_up_proj": np.stack(turns).swapaxes(1, 2),
        "gate_up_proj_bias": np.stack(bias_turns),
        "down_proj": np.stack([e.down.T for e in experts]),
        "down_proj_bias": np.stack([e.biases[2] for e in experts]),
    }
    module.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    with torch.no_grad():
        return module(*map(torch.from_numpy, (rows, ids, router))).numpy()


results = {}
for bounded in (False, True):
    geometry = ModelGeometry(1, EXPERTS, TOP_K)
    model = ExpertModel("x", geometry, (0,), HIDDEN, SIZE, (1.702, 7.0) if bounded else None, False)
    experts = [random_expert(bounded) for _ in range(EXPERTS)]
    rows, router = 5 * normal(TOKENS, HIDDEN), rng.random((TOKENS, TOP_K), np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    some = np.where(rng.random(ids.shape) < 0.4, -1, ids)
    own = ModelingKernel()
    weights = own.pack(model, EXPERTS, experts)
    for which, dtype in product(KERNELS, ("float32", "bfloat16")):
        kernel = KERNELS[which](dtype)
        kernel.check(model)
        theirs = kernel.pack(model, EXPERTS, experts)
        for name, places in {"all": ids, "some": some, "none": np.full_like(ids, -1)}.items():
            wanted, got = own.compute(weights, rows, places, router), kernel.compute(theirs, rows, places, router)
            found = error(got, wanted) if wanted.any() else float(np.abs(got).max())
            results[f"{which} {dtype} {bounded} {name}"] = found
        assert kernel.compute(theirs, rows[:0], ids[:0], router[:0]).shape == (0, HIDDEN)
    if bounded:
        results["transformers"] = error(
            own.compute(weights, rows, ids, router), by_transformers(experts, rows, ids, router)
        )

blocks, scales = rng.integers(0, 256, (3, 8, 2, 16), np.uint8), rng.integers(110, 140, (3, 8, 2), np.uint8)
theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
results["mxfp4"] = error(from_mxfp4(blocks, scales).swapaxes(1, 2), theirs.numpy())
print(json.dumps(results))
