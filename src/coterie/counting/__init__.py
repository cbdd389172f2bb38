"""What is computed of each request's counts, as it is routed: by compiled code, or by numpy.

Arrays are contiguous; shapes and dtypes are the caller's business, who trusts nobody from outside.  The two differ in
rounding, by less than 1e-6 of a probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coterie.counting.arrays import Counts, Floats, Row, Sums
from coterie.counting.native import load_native
from coterie.counting.numpy_kernel import NumpyKernel
from coterie.native import LEVELS

__all__ = ["KERNEL", "Batches", "Counts", "Floats", "Kernel", "Row", "Similarity", "Sums", "kernels"]


class Batches(Protocol):
    """Sums of rows, and what requests used on average, of several batches of requests.

    With n (layer, expert) pairs and, for each batch, a mean `[n]` and `alike` `[n]`, at first 0 and 1.

    Attributes:
        sums: `[batches, n]`, at first 0.
    """

    sums: Sums

    def join(self, batch: int, usage: Floats, requests: int) -> tuple[Row, float]:
        """A request joins: its row is added to a batch's sums, and it counts as one of so many in the batch's mean.

        Returns:
            the row, and as `grow`.
        """
        ...

    def grow(self, batch: int, by: Row | Sums, sign: int = 1) -> float:
        """Add to a batch's sums, or take away.

        Returns:
            sum of exp(sums 2^-20): how many pairs are expected to be idle.
        """
        ...

    def compose(self, batch: int, share: float, weight: float) -> None:
        """Make a batch's alike = exp(share * (sums 2^-20 + weight log(1 - mean)))."""
        ...

    def products(self, usage: Floats) -> npt.NDArray[np.float64]:
        """The product of each batch's alike with `usage`; equal ones give equal figures wherever they stand."""
        ...


class Similarity(Protocol):
    """How alike counts are to vectors; not for several threads at once."""

    def __call__(self, counts: Counts, vectors: Floats) -> tuple[npt.NDArray[np.float64], float]:
        """The products `[K]` of `vectors [K, kept * E]` with weighed counts x of `[L, E]`, and the length |x|."""
        ...


class Kernel(Protocol):
    """The arithmetic."""

    name: str

    def conserves(self, counts: Counts, each: int, most: int) -> bool:
        """Whether each layer of `[L, E]` sums to `each`, and no count is greater than `most`."""
        ...

    def from_base64(self, text: bytes, size: int) -> npt.NDArray[np.uint8] | None:
        """The `size` bytes, at least one, that the whole of a text in base64 stands for; None if it is not that."""
        ...

    def usage(self, counts: Counts, covered: int, most: float) -> Floats:
        """Shares `[n]` of `covered` tokens, each at most `most`."""
        ...

    def similarity(self, layers: Sums, weights: Floats | None) -> Similarity:
        """How alike counts are to vectors, by some layers `[kept]` and weights `[kept, E]`; None for ones."""
        ...

    def row(self, usage: Floats) -> Row:
        """What a request of this usage, below 1, adds to its batch's sums: round(2^20 log(1 - usage))."""
        ...

    def blend(self, mean: Floats, usage: Floats, requests: int) -> None:
        """Count one more of so many requests in a mean: mean += (usage - mean) / requests."""
        ...

    def batches(self, count: int, pairs: int) -> Batches:
        """So many batches of no requests."""
        ...


def kernels() -> Iterator[Kernel]:
    """All that can run here, fastest first; the last is always numpy."""
    yield from filter(None, map(load_native, LEVELS))
    yield NumpyKernel()


KERNEL: Kernel = next(kernels())
"""The fastest."""
