"""What computes: numpy, or compiled code.

Both give each row the same bits in every batch; the bits of the two differ from one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from coterie.modeling.attention import CacheHeads
from coterie.modeling.experts import ExpertWeights
from coterie.modeling.gates import Choice
from coterie.modeling.native import load_native
from coterie.modeling.numpy_kernel import NumpyKernel
from coterie.modeling.step import StepBatch
from coterie.modeling.tiles import Floats, Shape
from coterie.native import LEVELS


class StepAttention(Protocol):
    """Attention of one step's tokens over a paged cache."""

    def __call__(self, queries: Floats, layer: int) -> Floats:
        """From scaled `queries [T, heads, share, key_dim]` to `[T, heads, share, value_dim]`, in one layer.

        The step's own keys and values are in the cache.
        """


class Kernel(Protocol):
    """The arithmetic of a model; a row's bits depend on that row, its weights and its context alone."""

    name: str

    def check(self, shapes: Iterable[Shape]) -> None:
        """Check that this machine computes products of these shapes alike in every row.

        Raises:
            UnsupportedError: it does not.
        """

    def product(self, rows: Floats, blocks: Floats, columns: int) -> Floats:
        """`rows [T, K]` times a matrix stored as `blocks [B, K, width]`: `[T, columns]`."""

    def product_by_head(self, rows: Floats, matrices: Floats) -> Floats:
        """Each head's `rows [T, H, K]` times its own of `matrices [H, K, N]`: `[T, H, N]`."""

    def rms_norm(self, values: Floats, weight: Floats, eps: float) -> Floats:
        """Root mean square norm, x / sqrt(mean(x^2) + eps) * weight, over the last axis (arXiv 1910.07467).

        Args:
            values: `[T, N]` or `[T, H, N]`.
            weight: `[N]`.
            eps: epsilon.
        """

    def rotate(self, values: Floats, cos: Floats, sin: Floats) -> Floats:
        """Rotate heads `[T, H, dim]` by their tokens' angles, two of `[T, 1, dim / 2]`; see `rope`."""

    def dense(self, rows: Floats, weights: ExpertWeights) -> Floats:
        """A feed-forward that every token takes: `[T, D]` to `[T, D]`; `weights` are of one expert."""

    def routed(self, rows: Floats, choice: Choice, weights: ExpertWeights) -> Floats:
        """The weighted sum of what each token's experts make of it: `[T, D]` to `[T, D]`."""

    def attention(self, batch: StepBatch, kv: Floats, heads: CacheHeads, window: int | None) -> StepAttention:
        """Lay out a checked step over a cache, whose `window` positions a token sees; None for all."""


def kernels() -> Iterator[Kernel]:
    """All kernels that can run here, fastest first; the last is always numpy."""
    yield from filter(None, map(load_native, LEVELS))
    yield NumpyKernel()
