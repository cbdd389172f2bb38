"""Signatures: the unit vector that says which experts a prompt used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, SupportsIndex, cast, get_args

import numpy as np
import numpy.typing as npt

from coterie.core import Counts, ModelGeometry
from coterie.counting import KERNEL, Similarity
from coterie.errors import InputError

Kind = Literal["count_idf", "count", "sqrt", "binary", "gate_prob", "gate_logit"]
"""What a signature is made of; `SignatureTransform` has the formulas."""

KINDS: tuple[Kind, ...] = get_args(Kind)
COUNT_KINDS: tuple[Kind, ...] = KINDS[:4]
"""Those that need counts alone, which is all that engines report to a gateway."""

LINEAR_KINDS: tuple[Kind, ...] = KINDS[:2]
"""Those of them that weigh counts and no more."""

Statistic = Literal["counts", "gate_prob", "gate_logit"]
"""What an engine recorded of a prompt, `[L, E]`."""

Weights = npt.NDArray[np.float32]
"""One weight for each expert of each layer, `[L, E]`."""

Rows = npt.NDArray[np.float32]
"""Signatures `[..., D]`: each a unit vector or all zero."""


def fit_idf(counts: Counts) -> Weights:
    """Inverse document frequency of each expert (ELDR section 1.3).

        w[l, e] = ln((N + 1) / (df[l, e] + 1)),   df[l, e] = requests with counts[l, e] > 0

    An expert that every request used tells nothing and weighs 0; one that no request used weighs most.

    Args:
        counts: `[N, L, E]`, N >= 1.

    Returns:
        `[L, E]`, none negative.
    """
    requests = len(counts)
    frequency = np.count_nonzero(counts, axis=0)  # (L, E)
    weights: Weights = np.log((requests + 1) / (frequency + 1)).astype(np.float32)
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class SignatureTransform:
    """Turns what an engine recorded of a prompt into its signature.

        x = concatenation over the kept layers l, ascending, of f(values[l, :])
        s = x / |x|

    where f depends on the kind:

        count_idf    counts * idf     how often an expert was used, times how much that tells
        count        counts
        sqrt         sqrt(counts)     damps the experts that a prompt uses most
        binary       counts > 0       1 or 0: whether an expert was used at all
        gate_prob    values           gate probabilities summed over the prompt's tokens, all experts
        gate_logit   values           gate logits summed over the prompt's tokens, negative ones too

    One norm over all kept layers (not one per layer) lets the layers in which requests differ weigh more.
    Nothing is centred.

    A request whose x is all zero has no direction: with `count_idf`, one that used only experts of weight 0 in
    the kept layers.  Its row is all zero.  Routing falls back to load for it, and fitting refuses it.

    Source: the six signatures of ELDR Figure 7; mask, IDF and norm of ELDR section 1.3.

    Attributes:
        geometry: the model's routed part.
        layers: positions of the kept layers, ascending.
        kind: one of `KINDS`.
        idf: `[L, E]` weights, finite, none negative, some positive in the kept layers; None unless `count_idf`.

    Raises:
        InputError: the layers, the kind or the weights are not as described.
    """

    geometry: ModelGeometry
    layers: tuple[int, ...]
    kind: Kind = "count_idf"
    idf: Weights | None = None
    _kept: slice | npt.NDArray[np.intp] = field(init=False, repr=False)
    _weights: Weights | None = field(init=False, repr=False)
    _similarity: Similarity = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_kind(self.kind, self.idf)
        object.__setattr__(self, "layers", _layers(self.layers, self.geometry.layers))
        if self.idf is not None:
            _check_idf(self.idf, self.geometry, self.layers)
        everything = len(self.layers) == self.geometry.layers
        kept = slice(None) if everything else np.array(self.layers)  # a slice spares a copy per request
        object.__setattr__(self, "_kept", kept)
        weights = None if self.idf is None else np.ascontiguousarray(self.idf[kept])
        object.__setattr__(self, "_weights", weights)
        object.__setattr__(self, "_similarity", KERNEL.similarity(np.array(self.layers, np.int64), weights))

    @property
    def reads(self) -> Statistic:
        """What `apply` takes: expert counts, or sums of gate probabilities or logits."""
        return "counts" if self.kind in COUNT_KINDS else cast("Statistic", self.kind)

    @property
    def dimensions(self) -> int:
        """D: kept layers x experts."""
        return len(self.layers) * self.geometry.experts

    def features(self, values: Counts | npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The parts f(values[l, :]) of x, before the norm.

        Args:
            values: `[N, L, E]` or `[L, E]`: unsigned counts, or float32 gate sums, as `reads` says.

        Returns:
            `[N, kept layers, E]` or `[kept layers, E]`, a new array.

        Raises:
            InputError: the values are of another geometry or another sort.
        """
        shape = (self.geometry.layers, self.geometry.experts)
        if values.shape[-2:] != shape or values.ndim not in (2, 3):
            raise InputError(f"signature: {self.reads} of shape {values.shape} are not of {self.geometry}")
        if values.dtype.kind != ("u" if self.kind in COUNT_KINDS else "f"):
            raise InputError(f"signature: {self.kind} reads {self.reads}, got values of dtype {values.dtype}")
        found: npt.NDArray[np.float32] = values[..., self._kept, :].astype(np.float32)
        if self._weights is not None:
            found *= self._weights
        elif self.kind == "sqrt":
            np.sqrt(found, out=found)
        elif self.kind == "binary":
            np.minimum(found, 1, out=found)
        return found

    def similarities(self, counts: Counts, vectors: Rows) -> list[float] | None:
        """The cosine of one request's signature with each of some unit vectors; None if it has no direction.

        As `vectors @ apply(counts)`, but for rounding, at the speed that a decision needs.

        Args:
            counts: `[L, E]`; `reads` must be "counts".
            vectors: `[K, D]`.

        Raises:
            InputError: counts or vectors are of another shape.
        """
        shape = (self.geometry.layers, self.geometry.experts)
        if counts.shape != shape or vectors.shape[1:] != (self.dimensions,):
            raise InputError(f"signature: counts {counts.shape} and vectors {vectors.shape} are not of {self.geometry}")
        if self.kind in LINEAR_KINDS:
            products, length = self._similarity(counts, vectors)
        else:
            features = self.features(counts).ravel()
            products, length = (vectors @ features).astype(float), float(np.sqrt(features.dot(features)))
        found: list[float] = (products / length).tolist() if length else []
        return found or None

    def apply(self, values: Counts | npt.NDArray[np.float32]) -> Rows:
        """Signatures of one request or many.

        Args:
            values: `[L, E]` or `[N, L, E]`, as for `features`.

        Returns:
            `[D]` or `[N, D]`, each row of length 1 or all zero.

        Raises:
            InputError: see `features`.
        """
        found = self.features(values)
        rows: Rows = found.reshape(*values.shape[:-2], self.dimensions)
        wide = None if self.kind in COUNT_KINDS else np.float64  # float32 need not hold the square of a gate sum
        norms = np.sqrt(np.einsum("...d,...d->...", rows, rows, dtype=wide))[..., None]
        np.divide(rows, norms, out=rows, where=norms > 0)
        return rows


def _check_kind(kind: str, idf: Weights | None) -> None:
    if kind not in KINDS:
        raise InputError(f"signature: no kind {kind!r}; one of {', '.join(KINDS)}")
    if (kind == "count_idf") != (idf is not None):
        raise InputError(f"signature: kind {kind} takes {'no idf' if idf is not None else 'idf weights'}")


def _layers(layers: Sequence[SupportsIndex], most: int) -> tuple[int, ...]:
    """The layers as Python's own numbers, which a profile's header can hold."""
    try:
        found = tuple(index(layer) for layer in layers)
    except TypeError:
        found = ()
    if not found or list(found) != sorted(set(found)) or not 0 <= found[0] <= found[-1] < most:
        raise InputError(
            f"signature: layers {_brief(layers)} are not ascending, distinct whole numbers from 0 to {most - 1}"
        )
    return found


def _check_idf(idf: npt.NDArray[Any], geometry: ModelGeometry, layers: tuple[int, ...]) -> None:
    shape = (geometry.layers, geometry.experts)
    if idf.shape != shape or idf.dtype != np.float32:
        raise InputError(f"signature: idf has shape {idf.shape} {idf.dtype}, not {shape} float32")
    if not np.isfinite(idf).all() or idf.min() < 0:
        raise InputError("signature: idf holds a weight that is negative or not finite")
    if not idf[list(layers)].any():
        raise InputError(
            "signature: all idf weights of the kept layers are 0: every request used every expert; "
            "fit on requests that differ, or on shorter ones"
        )


def _brief(layers: Sequence[object]) -> str:
    text = str(list(layers))
    return text if len(text) <= 60 else f"{text[:57]}..."
