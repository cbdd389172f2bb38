"""A layer's experts on a GPU: a grouped GEMM in Triton.  Importing it imports torch and triton."""

from coterie.experts.triton.kernel import TritonKernel

__all__ = ["TritonKernel"]
