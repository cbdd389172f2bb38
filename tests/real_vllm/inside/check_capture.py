"""`bind_capture` against vLLM's own classes: which routers and kernels are refused, and what capture returns."""

from types import SimpleNamespace

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from coterie.errors import UnsupportedError
from coterie.vllm_plugin.capture import HostCapture, bind_capture
from coterie.vllm_plugin.stats import HookClock


class Router(BaseRouter):
    """A router that chooses what it is told."""

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        return router_logits, hidden_states

    routing_method_type = None


def runner(layer, router, monolithic=False):
    kind = type("Runner", (MoERunner,), {"layer_id": layer, "router": router, "_quant_method": None})
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    kind._quant_method = SimpleNamespace(is_monolithic=monolithic, moe_kernel=None)
    return made


def config(*runners):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(runners))),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 4),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )


def refusal(*runners):
    try:
        bind_capture(config(*runners), torch.device("cpu"), HookClock())
    except UnsupportedError as error:
        return str(error)
    raise SystemExit("nothing was refused")


routers = [Router(2, 8), Router(2, 8)]
assert "--moe-backend" in refusal(runner(0, object())), "a router without capture"
assert "monolithic" in refusal(runner(0, routers[0], monolithic=True)), "a kernel without capture"
assert "MoE layers are []" in refusal(), "no MoE layer"
assert "MoE layers are [1, 1]" in refusal(runner(1, routers[0]), runner(1, routers[1])), "two runners of one layer"

capture = bind_capture(config(runner(3, routers[1]), runner(1, routers[0])), torch.device("cpu"), HookClock())
assert isinstance(capture, HostCapture)
assert capture.layers == [1, 3]
ids = [torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[7, 0], [1, 3], [2, 4]])]
for router, chosen in zip(routers, ids, strict=True):
    router._select_experts(chosen, torch.ones(3, 2), None)
taken = capture.take(2)
np.testing.assert_array_equal(taken, [[[1, 2], [7, 0]], [[3, 4], [1, 3]]])
assert capture.take(2) is None, "ids of an earlier step were returned"
routers[0]._select_experts(ids[0], torch.ones(3, 2), None)
assert capture.take(2) is None, "a layer that did not route was not noticed"
print("capture agrees")
