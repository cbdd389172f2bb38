"""The expert ids of a forward pass, from vLLM's own capture hook on each layer's router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.errors import UnsupportedError
from coterie.vllm_plugin.stats import HookClock


class DeviceCapture:
    """vLLM's own capturer, which knows the row layouts of each kind of parallelism, on the clock.

    It copies into a preallocated buffer, as CUDA graphs need.

    Attributes:
        layers: indices of the MoE layers among the hidden layers.
    """

    on_host = False

    def __init__(self, config: Any, layers: list[int], clock: HookClock) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer

        self.layers = layers
        self._clock = clock
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        self._all_layers = len(layers) == self._capturer.device_buffer.shape[1]

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Called by a layer's router in each forward pass."""
        with self._clock:
            self._capturer.capture(layer_id, topk_ids)

    def take(self, tokens: int) -> Any:
        """`[tokens, L, top_k]` expert ids of the last forward pass."""
        rows = self._capturer.device_buffer[:tokens]
        return rows if self._all_layers else rows[:, self.layers]


class HostCapture:
    """On a CPU without data parallelism: keeps each router's own ids until the forward's end, and copies nothing.

    Attributes:
        layers: indices of the MoE layers among the hidden layers.
    """

    on_host = True

    def __init__(self, layers: list[int]) -> None:
        self.layers = layers
        self._ids: dict[int, Any] = {}

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        """Called by a layer's router in each forward pass."""
        self._ids[layer_id] = topk_ids

    def take(self, tokens: int) -> npt.NDArray[np.integer[Any]] | None:
        """`[tokens, L, top_k]` expert ids of the last forward pass, or None where a layer did not route it whole."""
        ids, self._ids = self._ids, {}
        if len(ids) < len(self.layers) or any(len(rows) < tokens for rows in ids.values()):
            return None
        rows = np.concatenate([ids[layer].numpy()[:tokens] for layer in self.layers], axis=1)  # (tokens, L * top_k)
        return rows.reshape(tokens, len(self.layers), -1)


def bind_capture(config: Any, device: Any, clock: HookClock) -> HostCapture | DeviceCapture:
    """Attach to the routers of all MoE layers.

    Raises:
        UnsupportedError: a kernel or router that cannot be captured, or no MoE layer.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

    modules = config.compilation_config.static_forward_context.values()
    runners = [module for module in modules if isinstance(module, MoERunner)]
    layers = sorted(runner.layer_id for runner in runners)
    if not layers or len(set(layers)) != len(layers) or layers[-1] >= config.model_config.get_total_num_hidden_layers():
        raise UnsupportedError(f"coterie cannot count experts of this model: its MoE layers are {layers}")
    on_host = device.type == "cpu" and config.parallel_config.data_parallel_size == 1
    capture = HostCapture(layers) if on_host else DeviceCapture(config, layers, clock)
    try:
        bind_routed_experts_capturer(SimpleNamespace(modules=lambda: iter(runners)), capture)
    except ValueError as error:
        raise UnsupportedError(
            f"coterie cannot count experts with this MoE kernel: {error} "
            "Choose a kernel with capture by --moe-backend: flashinfer_trtllm, or a modular one such as marlin."
        ) from error
    return capture
