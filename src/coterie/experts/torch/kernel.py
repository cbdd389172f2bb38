"""torch's grouped GEMM as a kernel of expert servers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from coterie.errors import UnsupportedError
from coterie.experts.torch.grouped import routed
from coterie.experts.torch.target import ALIGN, DeviceExperts, Target
from coterie.modeling.expert_tensors import Expert, ExpertModel
from coterie.modeling.gates import Ids
from coterie.modeling.tiles import Floats

_GROUPS = 1023
"""The most that a launch of the grouped GEMM takes: a thread prepares each (ATen/native/cuda/GroupMM.cu)."""


class TorchKernel:
    """Experts on a CUDA device, or on the CPU.

    Args:
        device: where; by default `cuda` if torch sees one, else `cpu`.
        dtype: of weights and of each product; by default bfloat16 on a GPU, and float32 on a CPU.
    """

    def __init__(self, device: str | None = None, dtype: torch.dtype | None = None) -> None:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._target = Target(chosen, dtype or (torch.float32 if chosen.type == "cpu" else torch.bfloat16))
        self.name = f"torch {chosen.type} {str(self._target.dtype).removeprefix('torch.')}"

    def check(self, model: ExpertModel) -> None:
        """As `server.kernels.Kernel.check`.

        Raises:
            UnsupportedError: there is no such device, or rows of the model would not begin at multiples of 16 bytes.
        """
        self._target.check(self.name)
        if model.hidden % ALIGN:
            raise UnsupportedError(f"kernel {self.name}: hidden size {model.hidden} is no multiple of {ALIGN}")

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> DeviceExperts:
        """As `server.kernels.Kernel.pack`.

        Raises:
            UnsupportedError: so many experts of one layer.
        """
        if count > _GROUPS:
            raise UnsupportedError(f"kernel {self.name}: {count} experts of a layer; it takes at most {_GROUPS}")
        return self._target.pack(model, count, experts)

    def compute(self, weights: DeviceExperts, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `server.kernels.Kernel.compute`."""
        return self._target.compute(routed, weights, rows, places, router)
