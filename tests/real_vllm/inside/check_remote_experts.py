"""What vLLM with experts in servers refuses; prints how many refusals were as they should be."""

import os
from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import CUDAGraphMode

from coterie.errors import CoterieError
from coterie.vllm_experts import ops
from coterie.vllm_experts.layer import _check, _hidden_layer
from coterie.vllm_experts.loader import read_config


def parallel(**changes):
    return SimpleNamespace(**{"is_sequence_parallel": False, "pcp_size": 1, "enable_eplb": False, **changes})


def refusal(act, *arguments, **named):
    try:
        act(*arguments, **named)
    except CoterieError as error:
        return str(error)
    return ""


def engine_with(graphs):
    return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=graphs))


engine = engine_with(CUDAGraphMode.NONE)
cases = [
    *(
        (refusal(_check, engine_with(mode), parallel(), in_input=False), "CUDA graphs (use --enforce-eager, or")
        for mode in CUDAGraphMode
        if mode is not CUDAGraphMode.NONE
    ),
    (refusal(_check, engine, parallel(), in_input=False), ""),
    (refusal(_check, engine, parallel(is_sequence_parallel=True), in_input=False), "sequence parallelism"),
    (refusal(_check, engine, parallel(pcp_size=2), in_input=False), "context parallelism in prefill"),
    (refusal(_check, engine, parallel(enable_eplb=True), in_input=False), "vLLM's own expert balancing"),
    (refusal(_check, engine, parallel(), in_input=True), "router weights"),
    (refusal(_hidden_layer, "model.mlp.experts"), "no number of a layer"),
    (refusal(read_config, {}), "need 'monitor'"),
    (refusal(read_config, {"monitor": "http://a:1", "other": 1}), "need 'monitor'"),
    (refusal(read_config, {"monitor": "http://a:1", "timeout_s": 0}), "must be positive"),
    (refusal(read_config, {"monitor": "http://a:1", "timeout_s": 5.0}), ""),
]
for found, wanted in cases:
    assert wanted in found, (found, wanted)
    assert wanted or not found, found


class Replies(dict):
    """A reply for any ticket."""

    def __init__(self, tokens):
        self.tokens = tokens

    def pop(self, ticket):
        return lambda: np.ones((self.tokens, 4), np.float32)


def check_operators(rank, ranks, own):
    """What torch is told of the operators' results, before they are run, against the results."""
    started = SimpleNamespace(finish=lambda deadline_s: None)
    remote = SimpleNamespace(start=lambda layer, hidden, ids, weights, dtype: started)
    ops._connections = ops._Connections(os.getpid(), remote, {7: 0}, 1.0)
    ops.get_tensor_model_parallel_rank, ops.get_tensor_model_parallel_world_size = lambda: rank, lambda: ranks
    hidden = torch.zeros(4, 5, dtype=torch.bfloat16).T  # columns side by side: results are not
    choices = torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int32)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.vllm.coterie_experts_start, (hidden, *choices, 7), test_utils=kinds)
    ops._connections.under_way = Replies(len(range(5)[own]))
    arguments = torch.tensor([0]), hidden
    torch.library.opcheck(torch.ops.vllm.coterie_experts_finish, arguments, test_utils=kinds)
    wanted = torch.zeros(5, 4)
    wanted[own] = 1
    assert torch.ops.vllm.coterie_experts_finish(*arguments).tolist() == wanted.tolist()


check_operators(0, 1, slice(0, 5))
check_operators(1, 2, slice(2, 5))
assert _hidden_layer("model.layers.12.mlp.experts") == 12
print(len(cases))
