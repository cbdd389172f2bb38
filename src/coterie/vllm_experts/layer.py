"""A layer of routed experts without weights."""

from __future__ import annotations

import re
from typing import Any

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts, SharedExpertsOrder

from coterie.errors import UnsupportedError
from coterie.vllm_experts import LOAD_FORMAT

_NO_GRAPHS = "use --enforce-eager, or -cc.cudagraph_mode=NONE to compile without them"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RemoteMethod(FusedMoEMethodBase):
    """What vLLM calls to compute a layer's routed experts.

    Args:
        moe: the layer's configuration.
        hidden_layer: its place among the model's hidden layers.
    """

    def __init__(self, moe: Any, hidden_layer: int) -> None:
        super().__init__(moe)
        self._hidden_layer = hidden_layer

    @property
    def supports_internal_mk(self) -> bool:
        """Tokens of other data-parallel ranks are not wanted."""
        return True

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """`apply` calls the shared experts."""
        return True

    def create_weights(self, layer: RoutedExperts, *_: Any, **__: Any) -> None:
        """There are none."""

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
        """Servers take hidden states as they are."""
        return hidden_size, intermediate_size

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """There is none."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Send the tokens, compute the shared experts meanwhile, and take the weighted sums `[T, H]`."""
        ticket = torch.ops.vllm.coterie_experts_start(x, topk_weights, topk_ids, self._hidden_layer)
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        result: torch.Tensor = torch.ops.vllm.coterie_experts_finish(ticket, x)
        return result


class _Remote:
    """What is changed of a layer's class, where the load format is ours."""

    apply_router_weight_on_input: bool

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        config = get_current_vllm_config()
        if config.load_config.load_format != LOAD_FORMAT:
            return super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
        _check(config, moe_config.moe_parallel_config, in_input=self.apply_router_weight_on_input)
        return RemoteMethod(moe_config, _hidden_layer(prefix))


def _check(config: Any, parallel: Any, *, in_input: bool) -> None:
    """Refuse what servers, or a host that sends and takes the tokens, cannot do.

    Nothing of a layer may be captured, and it is not enough to split graphs at vLLM's operator for it: what that gives
    has another address in each step, while the next graph reads where it was at the capture (`CUDAGraphWrapper`).

    Raises:
        UnsupportedError: naming it.
    """
    refused = {
        f"CUDA graphs ({_NO_GRAPHS})": config.compilation_config.cudagraph_mode is not CUDAGraphMode.NONE,
        "sequence parallelism": parallel.is_sequence_parallel,
        "context parallelism in prefill": parallel.pcp_size > 1,
        "vLLM's own expert balancing": parallel.enable_eplb,
        "router weights that multiply an expert's input": in_input,
    }
    if found := [name for name, is_so in refused.items() if is_so]:
        raise UnsupportedError(f"experts in servers do not go with {', '.join(found)}")


def _hidden_layer(name: str) -> int:
    """The layer's number among the model's hidden layers.

    Raises:
        UnsupportedError: its name has none.
    """
    found = _LAYER.findall(name)
    if len(found) != 1:
        raise UnsupportedError(f"{name}: the name has no number of a layer, by which servers know its experts")
    return int(found[0])


def replace_layers() -> None:
    """Have vLLM build layers of remote experts from now on; any number of times."""
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
    from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

    for kind in (RoutedExperts, GptOssRoutedExperts, TransformersRoutedExperts):
        if kind.__name__ not in op_registry_oot:
            kind.register_oot(type(f"Remote{kind.__name__}", (_Remote, kind), {}))
