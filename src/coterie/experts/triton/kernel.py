"""The Triton products as a kernel of expert servers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

import torch

from coterie.errors import UnsupportedError
from coterie.experts.torch.target import DeviceExperts, Target
from coterie.experts.triton.grouped import routed
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
        self._target = Target(torch.device(device), dtype)

    def check(self, model: ExpertModel) -> None:
        """As `server.kernels.Kernel.check`.

        Raises:
            UnsupportedError: there is no such device, and Triton does not interpret.
        """
        self._target.check(self.name)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if self._target.device.type == "cpu" and not interpreted:
            raise UnsupportedError(
                "the Triton kernel computes on a GPU; on a CPU only with TRITON_INTERPRET=1, for tests"
            )
        if self._target.device.type == "cpu" and self._target.dtype is torch.bfloat16:
            raise UnsupportedError(
                "Triton's interpreter multiplies bfloat16 as integers; take float32 or float16 there"
            )

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> DeviceExperts:
        """As `server.kernels.Kernel.pack`."""
        return self._target.pack(model, count, experts)

    def compute(self, weights: DeviceExperts, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `server.kernels.Kernel.compute`."""
        return self._target.compute(partial(routed, programs=self._programs()), weights, rows, places, router)

    def _programs(self) -> int:
        device = self._target.device
        if device.type == "cuda":
            return _PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)
        return _PROGRAMS
