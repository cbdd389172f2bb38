"""The Triton products as a kernel of expert servers."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import torch

from coterie.errors import UnsupportedError
from coterie.experts.triton.grouped import DeviceExperts, routed
from coterie.modeling.expert_tensors import Expert, ExpertModel
from coterie.modeling.gates import Ids
from coterie.modeling.tiles import Floats

_PROGRAMS = 2
"""Programs for each multiprocessor."""


class TritonKernel:
    """Experts on a CUDA device, or on the CPU in Triton's interpreter (`TRITON_INTERPRET=1`), which is for tests.

    Args:
        device: where the weights are.
        dtype: of weights, hidden states and what is between the products; sums are float32.
    """

    name = "triton"

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self._device, self._dtype = torch.device(device), dtype

    def check(self, model: ExpertModel) -> None:
        """As `server.kernels.Kernel.check`.

        Raises:
            UnsupportedError: there is no such device, and Triton does not interpret.
        """
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if self._device.type == "cpu" and not interpreted:
            raise UnsupportedError(
                "the Triton kernel computes on a GPU; on a CPU only with TRITON_INTERPRET=1, for tests"
            )
        if self._device.type == "cpu" and self._dtype is torch.bfloat16:
            raise UnsupportedError(
                "Triton's interpreter multiplies bfloat16 as integers; take float32 or float16 there"
            )
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError("the Triton kernel needs a CUDA device, and torch sees none; take another kernel")

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> DeviceExperts:
        """As `server.kernels.Kernel.pack`: one expert after the other goes to the device."""
        size, width = model.size, model.hidden
        gate_up, down = self._empty(count, 2 * size, width), self._empty(count, width, size)
        bounded = model.bounds is not None
        gate_up_bias = torch.zeros(count, 2 * size, device=self._device) if bounded else None
        down_bias = torch.zeros(count, width, device=self._device) if bounded else None
        for place, expert in zip(range(count), experts, strict=True):
            gate_up[place] = torch.from_numpy(np.concatenate((expert.gate, expert.up)))
            down[place] = torch.from_numpy(np.ascontiguousarray(expert.down))
            if expert.biases is not None and gate_up_bias is not None and down_bias is not None:
                gate, up, outward = expert.biases
                gate_up_bias[place] = torch.from_numpy(np.concatenate((gate, up)))
                down_bias[place] = torch.from_numpy(np.ascontiguousarray(outward))
        slope, limit = model.bounds or (1.0, float("inf"))
        return DeviceExperts(gate_up, down, gate_up_bias, down_bias, slope, limit)

    def compute(self, weights: DeviceExperts, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `server.kernels.Kernel.compute`; waits for the device, since the caller wants the values."""
        hidden = self._sent(rows).to(self._dtype)
        ids = self._sent(places.astype(np.int32))
        sums = routed(hidden, ids, self._sent(router), weights, self._programs())
        found: Floats = sums.cpu().numpy()
        return found

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)

    def _programs(self) -> int:
        if self._device.type == "cuda":
            return _PROGRAMS * int(torch.cuda.get_device_properties(self._device).multi_processor_count)
        return _PROGRAMS
