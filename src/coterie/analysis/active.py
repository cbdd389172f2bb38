"""How many different experts a batch activates in each layer of a decode step.

That number is what locality is to lower: while decoding is bound by memory, a step reads the weights of
every expert that at least one request of the batch chose (ELDR, section on motivation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coterie.analysis.correlation import Floats, Indices
from coterie.core import Counts
from coterie.errors import InputError
from coterie.wire import Ids

MOST_STEPS = 256

Method = Literal["replayed", "expected"]
_CHUNK_BYTES = 64 << 20
_BITS = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeUse:
    """Which experts the outputs of N requests used.

    Attributes:
        counts: `[N, L, E]` counts of output tokens.
        tokens: `[N]` tokens counted, each at least 1.
        ids: `[sum of tokens, L, top_k]` expert ids, request after request; None where only counts were recorded.

    Raises:
        InputError: a request without tokens, or shapes or numbers that do not belong together.
    """

    counts: Counts
    tokens: npt.NDArray[np.int64]
    ids: Ids | None = None

    def __post_init__(self) -> None:
        if self.counts.ndim != 3 or self.tokens.shape != (len(self.counts),):
            raise InputError(f"active experts: counts {self.counts.shape} of {self.tokens.shape} outputs")
        if (self.tokens < 1).any():
            raise InputError(f"active experts: request {int(self.tokens.argmin())} has no counted output token")
        if self.ids is not None and self.ids.shape[:2] != (self.tokens.sum(), self.counts.shape[1]):
            raise InputError(f"active experts: ids {self.ids.shape} do not belong to {self.tokens.sum()} tokens")
        if self.ids is not None and not 0 <= self.ids.min() <= self.ids.max() < self.counts.shape[2]:
            raise InputError(f"active experts: an id outside 0..{self.counts.shape[2] - 1}")
        if (self.counts.max(axis=(1, 2)) > self.tokens).any():
            raise InputError("active experts: a request used an expert more often than it has tokens")

    @property
    def method(self) -> Method:
        """How batches are measured: replayed from ids, or expected from counts."""
        return "expected" if self.ids is None else "replayed"

    def active(self, batches: Sequence[Indices]) -> Floats:
        """Mean number of different experts that each batch activates in each layer of a step.

        With ids, the batch is replayed: at step t, request i contributes the experts of its output token
        t mod tokens[i] (a shorter output starts over), and the union is counted.  Mean over the steps of the
        longest output, at most `MOST_STEPS`.

        With counts alone, the expectation if every request is at a random step of its own:

            sum over e of 1 - product over i of (1 - counts[i, l, e] / tokens[i])

        which is the exact mean of the union over all combinations of steps.

        Args:
            batches: positions of each batch's requests.

        Returns:
            `[batches, L]`.
        """
        measure = _replay(self.ids, self.tokens) if self.ids is not None else _expect(self.counts, self.tokens)
        _, L, E = self.counts.shape
        found = np.empty((len(batches), L))
        bytes_per_layer = len(self.ids) * -(-E // 8) if self.ids is not None else len(self.counts) * E * 4
        step = max(1, _CHUNK_BYTES // bytes_per_layer)
        for start in range(0, L, step):
            layers = slice(start, min(start + step, L))
            found[:, layers] = measure(layers, E, batches)
        return found


_Measure = Callable[[slice, int, Sequence[Indices]], Floats]


def _replay(ids: Ids, tokens: npt.NDArray[np.int64]) -> _Measure:
    steps = min(int(tokens.max()), MOST_STEPS)
    starts = np.cumsum(tokens) - tokens
    rows = starts[:, None] + np.arange(steps) % tokens[:, None]  # (N, steps)

    def measure(layers: slice, experts: int, batches: Sequence[Indices]) -> Floats:
        masks = expert_sets(ids[:, layers], experts)
        unions = (np.bitwise_or.reduce(masks[rows[batch]], axis=0) for batch in batches)  # (steps, layers, E / 8)
        return np.stack([_BITS[union].sum(axis=(0, 2)) / steps for union in unions])

    return measure


def expert_sets(ids: Ids, experts: int) -> npt.NDArray[np.uint8]:
    """Sets of experts as bits: `[tokens, layers, top_k]` ids to `[tokens, layers, ceil(E / 8)]` bytes."""
    masks = np.zeros((*ids.shape[:2], -(-experts // 8)), dtype=np.uint8)
    flat = masks.reshape(-1)
    first = np.arange(0, masks.size, masks.shape[2]).reshape(ids.shape[:2])  # first byte of each set
    for k in range(ids.shape[2]):  # one id of each set at a time: two of a set may share a byte
        chosen = ids[..., k].astype(np.int64)
        flat[first + (chosen >> 3)] |= np.left_shift(1, chosen & 7).astype(np.uint8)
    return masks


def count_experts(sets: npt.NDArray[np.unsignedinteger[Any]]) -> int:
    """How many experts are in sets of any shape and width, as `expert_sets` makes them, all together."""
    return int(_BITS[sets.view(np.uint8)].sum())


def _expect(counts: Counts, tokens: npt.NDArray[np.int64]) -> _Measure:
    def measure(layers: slice, experts: int, batches: Sequence[Indices]) -> Floats:
        used = counts[:, layers].astype(np.float32) / tokens[:, None, None].astype(np.float32)
        with np.errstate(divide="ignore"):  # an expert that every step uses: log 0, and it is surely active
            idle = np.log1p(-used)
        return np.stack([-np.expm1(idle[batch].sum(axis=0, dtype=np.float64)).sum(axis=1) for batch in batches])

    return measure
