"""What computes a layer's experts in a server: `modeling`'s own code, or another that follows `Kernel`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeVar

from coterie.errors import UnsupportedError
from coterie.modeling import kernels as modeling
from coterie.modeling.expert_tensors import Expert, ExpertModel, pack_experts
from coterie.modeling.experts import ExpertWeights
from coterie.modeling.gates import Choice, Ids
from coterie.modeling.tiles import Floats

WeightsT = TypeVar("WeightsT")
KernelName = Literal["coterie", "vllm", "vllm-bfloat16", "torch", "triton"]
_NEEDED = {"torch": "torch 2.10 or later", "triton": "torch for CUDA, with which triton comes"}


class Kernel(Protocol[WeightsT]):
    """Computes experts, whose weights it keeps in a form of its own."""

    name: str

    def check(self, model: ExpertModel) -> None:
        """Check that it can compute a model's experts on this machine.

        Raises:
            UnsupportedError: it cannot.
        """

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> WeightsT:
        """So many experts of a layer, given one after the other, in the kernel's form."""

    def compute(self, weights: WeightsT, rows: Floats, places: Ids, router: Floats) -> Floats:
        """The weighted sum of what experts make of each token; those that no token chose are not read.

        Args:
            weights: of a layer.
            rows: `[T, D]` hidden states.
            places: `[T, K]` experts of each token, by their place among those packed; -1 adds nothing.
            router: `[T, K]` weights of them.

        Returns:
            `[T, D]`.
        """


class ModelingKernel:
    """The embedded engine's arithmetic: a token's sum has the same bits in every batch.

    Args:
        kernel: which of `modeling.kernels`; by default the fastest that can run here.
    """

    def __init__(self, kernel: modeling.Kernel | None = None) -> None:
        self._kernel = kernel or next(modeling.kernels())
        self.name = self._kernel.name

    def check(self, model: ExpertModel) -> None:
        """As `Kernel.check`."""
        self._kernel.check(model.shapes())

    def pack(self, model: ExpertModel, count: int, experts: Iterable[Expert]) -> ExpertWeights:
        """As `Kernel.pack`."""
        return pack_experts(model, count, experts)

    def compute(self, weights: ExpertWeights, rows: Floats, places: Ids, router: Floats) -> Floats:
        """As `Kernel.compute`."""
        return self._kernel.routed(rows, Choice(places, router), weights)


def make_kernel(name: KernelName) -> Kernel[Any]:
    """The kernel of a name.

    Raises:
        UnsupportedError: what it needs is not installed.
    """
    if name == "coterie":
        return ModelingKernel()
    if name in _NEEDED:
        try:
            return _of_torch(name)
        except ImportError as error:
            raise UnsupportedError(f"kernel {name}: {error}; install {_NEEDED[name]}") from None
    from coterie.experts.server.vllm_kernel import VllmKernel

    return VllmKernel("bfloat16" if name == "vllm-bfloat16" else "float32")


def _of_torch(name: str) -> Kernel[Any]:
    if name == "torch":
        from coterie.experts.torch.kernel import TorchKernel

        return TorchKernel()
    from coterie.experts.triton import TritonKernel

    return TritonKernel()
