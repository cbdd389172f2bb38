"""Drive the connector through vLLM's own V2-runner wrapper (`ActiveKVConnector`), which needs Triton to run whole.

The forward pass is replaced by writing expert ids where vLLM's capturer would; everything between the
scheduler's plan and the shared-memory slots is real.
"""

from types import SimpleNamespace

import numpy as np
import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

from coterie.core import ModelGeometry
from coterie.vllm_plugin import connector as module
from coterie.wire import PROMPT_KEY, decode_counts

L, E, K, BLOCK, BLOCKS = 2, 8, 2, 4, 6


class FullAttentionSpec:
    block_size = BLOCK


geometry = ModelGeometry(L, E, K)
kv_config = SimpleNamespace(
    num_blocks=BLOCKS,
    kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["attn"])],
    kv_cache_tensors=[SimpleNamespace(size=1 << 20)],
)
config = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, is_kv_producer=True),
    model_config=SimpleNamespace(
        get_num_experts=lambda: E, get_num_experts_per_tok=lambda: K, get_total_num_hidden_layers=lambda: L
    ),
    speculative_config=None,
    parallel_config=SimpleNamespace(
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        use_ubatching=False,
        nnodes=1,
        distributed_executor_backend="mp",
        data_parallel_size=1,
        is_moe_model=True,
    ),
    use_v2_model_runner=True,
    compilation_config=SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False),
        static_forward_context={},
        fast_moe_cold_start=False,
        static_all_moe_layers=[],
    ),
    scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=32),
)

captured = SimpleNamespace(layers=[0, 1], rows=None, on_host=False, take=lambda tokens: captured.rows[:tokens])
module.bind_capture = lambda *_: captured
parallel_state.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)

worker = module.CountsConnector(config, KVConnectorRole.WORKER, kv_config)
scheduler = module.CountsConnector(config, KVConnectorRole.SCHEDULER, kv_config)
worker.set_host_xfer_buffer_ops = lambda _: None
kv_transfer_state._KV_CONNECTOR_AGENT = worker
stock = VllmConfig()
runner = ActiveKVConnector(stock, {"attn": torch.zeros(1)})

rng = np.random.default_rng(0)
truth = np.zeros((L, E), int)


def scheduler_output(new, cached, blocks):
    tokens = {name: count for name, (_, count) in {**new, **cached}.items()}
    output = SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=c) for n, (c, _) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (blocks,)),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )
    output.kv_connector_metadata = scheduler.build_connector_meta(output)
    return output


def step(output, slots):
    """One step as `GPUModelRunner.execute_model` and `sample_tokens` of vLLM 0.32 call it, piecewise graphs."""
    batch = SimpleNamespace(idx_mapping=None, req_ids=list(output.num_scheduled_tokens), num_tokens=None)
    mapping = {"attn": torch.tensor(slots, dtype=torch.int64)}
    with set_forward_context(None, stock, slot_mapping=mapping):
        runner.pre_forward(output, batch)
        ids = rng.random((len(slots), L, E)).argsort(-1)[..., :K]
        captured.rows = torch.from_numpy(ids).to(torch.int32)
    runner.finish_forward()
    captured.rows = None  # the next forward may overwrite the buffer from here on
    for slot, token in zip(slots, ids, strict=True):
        for layer in range(L):
            if slot >= 0:
                truth[layer, token[layer]] += 1
    summed = worker._worker._slots._heads[:, 0, 0].max()
    runner.post_forward(set())
    return summed


request = SimpleNamespace(
    request_id="a", num_prompt_tokens=7, num_tokens=8, kv_transfer_params={"do_remote_decode": True}
)
blocks = [5, 2]
scheduler.on_new_request(request)
assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), 0)

# chunk 1: tokens 0..4 (and two padding rows), chunk 2: tokens 5..6
assert step(scheduler_output({"a": (0, 5)}, {}, blocks), [20, 21, 22, 23, 8, -1, -1]) == 0
assert step(scheduler_output({}, {"a": (5, 2)}, blocks), [9, 10]) > 0, "summed only after the output was copied"
runner.no_forward(scheduler_output({}, {}, blocks))

_, params = scheduler.request_finished_all_groups(request, (blocks,))
counts = decode_counts(params[PROMPT_KEY])
assert (counts.tokens, counts.covered) == (7, 7)
np.testing.assert_array_equal(counts.counts, truth)
scheduler.shutdown()
print("v2 sequence agrees")
