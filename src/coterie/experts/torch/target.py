"""Experts of a layer on a device, and a batch's way there and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from coterie.errors import UnsupportedError
from coterie.modeling.expert_tensors import Expert, ExpertModel
from coterie.modeling.gates import Ids
from coterie.modeling.tiles import Floats

ALIGN = 8
"""Intermediate sizes are filled up with zeros to a multiple of it: rows then begin at multiples of 16 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceExperts:
    """Experts of a layer, on one device.

    Attributes:
        gate_up: `[E, 2 I, D]`, an expert's gate rows and then its up rows.
        down: `[E, D, I]`.
        gate_up_bias: `[E, 2 I]` float32, of experts that have biases and bounds; see `modeling.experts`.
        down_bias: `[E, D]` float32, likewise.
        slope: factor in the sigmoid.
        limit: bound of gates and ups.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    slope: float = 1.0
    limit: float = float("inf")

    @property
    def experts(self) -> int:
        """How many."""
        return len(self.down)


Routed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DeviceExperts], torch.Tensor]
"""The weighted sums `[T, D]` float32 of hidden states `[T, D]`, int32 ids `[T, K]` and router weights `[T, K]`."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where experts are computed, and in what.

    Attributes:
        device: where.
        dtype: of weights, hidden states and what is between the products; sums are float32.
    """

    device: torch.device
    dtype: torch.dtype

    def check(self, kernel: str) -> None:
        """Check that torch has the device.

        Raises:
            UnsupportedError: naming the kernel, if it does not.
        """
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(f"kernel {kernel} needs a CUDA device, and torch sees none; take another kernel")

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> DeviceExperts:
        """As `server.kernels.Kernel.pack`: one expert after the other goes to the device."""
        size, padded, hidden = model.size, -(-model.size // ALIGN) * ALIGN, model.hidden
        inward, outward = self._zeros(count, 2, padded, hidden), self._zeros(count, hidden, padded)
        inward_bias = torch.zeros(count, 2, padded, device=self.device)
        outward_bias = torch.zeros(count, hidden, device=self.device)
        for place, expert in zip(range(count), experts, strict=True):
            inward[place, 0, :size], inward[place, 1, :size] = _tensor(expert.gate), _tensor(expert.up)
            outward[place, :, :size] = _tensor(expert.down)
            if expert.biases is not None:
                gate, up, down = map(_tensor, expert.biases)
                inward_bias[place, 0, :size], inward_bias[place, 1, :size], outward_bias[place] = gate, up, down
        matrices = inward.flatten(1, 2), outward
        if model.bounds is None:
            return DeviceExperts(*matrices)
        return DeviceExperts(*matrices, inward_bias.flatten(1), outward_bias, *model.bounds)

    def compute(self, routed: Routed, weights: DeviceExperts, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `server.kernels.Kernel.compute`; waits for the device, since the caller wants the values."""
        if not len(rows):
            return np.zeros(rows.shape, np.float32)
        hidden = self._sent(rows).to(self.dtype)
        sums: Floats = routed(hidden, self._sent(places.astype(np.int32)), self._sent(router), weights).cpu().numpy()
        return sums

    def _sent(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)


def _tensor(values: Floats) -> torch.Tensor:
    return torch.from_numpy(np.array(values))  # a copy: files are mapped read-only


def by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs of token and expert by expert; nothing here asks the device for a value.

    Args:
        ids: `[T, K]` int32 experts of each token; -1 for none.
        experts: how many there are.

    Returns:
        `[P]` the pairs, those of one expert together and in order, those of no expert last; and `[E + 1]` int32, how
        many pairs each expert has, and no expert.
    """
    keys = torch.where(ids < 0, experts, ids).flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, keys.long(), torch.ones_like(keys))
    return torch.sort(keys, stable=True).indices, counts
