"""An expert server: loads its experts, computes what clients ask of them, and says how busy it is."""

from coterie.experts.server.holdings import Holding, check_held, load_experts, parse_experts
from coterie.experts.server.kernels import Kernel, ModelingKernel
from coterie.experts.server.server import ExpertServer

__all__ = [
    "ExpertServer",
    "Holding",
    "Kernel",
    "ModelingKernel",
    "check_held",
    "load_experts",
    "parse_experts",
]
