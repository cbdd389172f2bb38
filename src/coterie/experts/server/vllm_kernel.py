"""vLLM's fused experts for CPUs, called without vLLM's Python code.

The operators are in the extension that vLLM's wheels for CPUs hold beside it, and need torch alone
(`vllm/_custom_ops.py`: `cpu_prepack_moe_weight`, `cpu_fused_moe`).  Tried with vLLM 0.32.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import UnsupportedError
from coterie.modeling.expert_tensors import Expert, ExpertModel
from coterie.modeling.gates import Ids
from coterie.modeling.tiles import Floats

_ALIGN = 32  # hidden and intermediate sizes must be multiples of it; the latter can be filled up
_BOUNDS = (1.702, 7.0)  # slope and limit that the operator has built in for "swigluoai"
_ISA = "vec"


@dataclass(frozen=True, slots=True, eq=False)
class VllmWeights:
    """A layer's experts as the operator has them: torch tensors, matrices in an order of its own."""

    inward: Any
    outward: Any
    inward_bias: Any | None
    outward_bias: Any | None


class VllmKernel:
    """See `Kernel`.  A token's bits may depend on its batch.

    Args:
        dtype: `float32`, or `bfloat16`, in which weights take half the memory and each sum is rounded to it.

    Raises:
        UnsupportedError: torch or vLLM for CPUs is not installed in this environment.
    """

    def __init__(self, dtype: str = "float32") -> None:
        self._torch, self._calls = _load()
        self._dtype = getattr(self._torch, dtype)
        self.name = f"vllm {dtype}"

    def check(self, model: ExpertModel) -> None:
        """As `Kernel.check`."""
        if model.hidden % _ALIGN:
            raise UnsupportedError(f"kernel {self.name}: hidden size {model.hidden} is no multiple of {_ALIGN}")
        if model.bounds not in (None, _BOUNDS):
            raise UnsupportedError(f"kernel {self.name}: slope and limit {model.bounds}; it has {_BOUNDS} alone")

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> VllmWeights:
        """As `Kernel.pack`."""
        torch, size, hidden = self._torch, -(-model.size // _ALIGN) * _ALIGN, model.hidden
        inward = torch.zeros((count, 2 * size, hidden), dtype=self._dtype)
        outward = torch.zeros((count, hidden, size), dtype=self._dtype)
        gates, ups = _rows(model, size)
        biases = (torch.zeros((count, 2 * size), dtype=self._dtype), torch.zeros((count, hidden), dtype=self._dtype))
        for place, expert in enumerate(experts):
            inward[place, gates] = self._tensor(expert.gate)
            inward[place, ups] = self._tensor(expert.up)
            outward[place, :, : model.size] = self._tensor(expert.down)
            if expert.biases is not None:
                gate, up, down = map(self._tensor, expert.biases)
                biases[0][place, gates], biases[0][place, ups], biases[1][place] = gate, up, down
        return VllmWeights(self._packed(inward), self._packed(outward), *(biases if model.bounds else (None, None)))

    def compute(self, weights: VllmWeights, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `Kernel.compute`."""
        own = places >= 0
        if own.all():
            return self._run(weights, rows, places, router)
        tokens, columns = np.nonzero(own)  # the operator takes no -1: a row for each pair of token and expert
        pairs = self._run(weights, rows[tokens], places[own][:, None], router[own][:, None])
        total = np.zeros(rows.shape, np.float32)
        for column in range(places.shape[1]):  # in which each token is there once
            here = columns == column
            total[tokens[here]] += pairs[here]
        return total

    def _run(self, weights: VllmWeights, rows: Floats, places: Ids, router: Floats) -> Floats:
        torch = self._torch
        hidden = torch.from_numpy(rows).to(self._dtype)
        result = torch.zeros_like(hidden)
        if len(rows):
            self._calls.cpu_fused_moe(
                *(result, hidden, weights.inward, weights.outward, weights.inward_bias, weights.outward_bias),
                *(torch.from_numpy(np.ascontiguousarray(router)), torch.from_numpy(places.astype(np.int32, order="C"))),
                *(False, "silu" if weights.inward_bias is None else "swigluoai", _ISA),
            )
        sums: Floats = result.to(torch.float32).numpy()
        return sums

    def _tensor(self, values: Floats) -> Any:
        return self._torch.from_numpy(np.array(values)).to(self._dtype)  # a copy: files are mapped read-only

    def _packed(self, matrices: Any) -> Any:
        result = self._torch.empty_like(matrices)
        self._calls.prepack_moe_weight(matrices, result, _ISA)
        return result


def _rows(model: ExpertModel, size: int) -> tuple[slice, slice]:
    """Where the operator wants gates and ups among `2 * size` rows: in turns if they are bounded, else in halves."""
    if model.bounds:
        return slice(0, 2 * model.size, 2), slice(1, 2 * model.size, 2)
    return slice(0, model.size), slice(size, size + model.size)


def _load() -> tuple[Any, Any]:
    """torch, and vLLM's operators."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    if not folders or not importlib.util.find_spec("torch"):
        raise UnsupportedError("kernel vllm: vLLM for CPUs is not in this environment; install coterie beside it")
    torch = importlib.import_module("torch")
    library = Path(folders[0], _library(torch))
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise UnsupportedError(f"kernel vllm: {library} cannot be loaded: {error}") from None
    return torch, torch.ops._C


def _library(torch: Any) -> str:
    """The extension for this processor, as `vllm.platforms.cpu` chooses it."""
    if platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported():
        return "_C.abi3.so"
    return f"_C_{'AVX512' if torch.cpu._is_avx512_supported() else 'AVX2'}.abi3.so"
