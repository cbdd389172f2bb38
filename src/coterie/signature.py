"""Signatures: the unit vector that says which experts a prompt used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import Counts, ModelGeometry
from coterie.errors import InputError

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
    """Turns counts into signatures.

        x = concatenation over the kept layers l, ascending, of counts[l, :] * idf[l, :]
        s = x / |x|

    Counts say how often an expert was used, IDF how much that tells; one norm over all layers (not one per
    layer) lets the layers in which requests differ weigh more.  Nothing is centred.

    A request that used only experts of weight 0 in the kept layers has no direction: its row is all zero.
    Routing falls back to load for it, and fitting refuses it.

    Source: ELDR section 1.3.

    Attributes:
        geometry: the model's routed part.
        idf: `[L, E]` weights, finite, none negative, some positive in the kept layers.
        layers: positions of the kept layers, ascending.

    Raises:
        InputError: the weights or the layers are not as described.
    """

    geometry: ModelGeometry
    idf: Weights
    layers: tuple[int, ...]
    _kept: slice | npt.NDArray[np.intp] = field(init=False, repr=False)
    _weights: Weights = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_layers(self.layers, self.geometry.layers)
        _check_idf(self.idf, self.geometry, self.layers)
        everything = len(self.layers) == self.geometry.layers
        kept = slice(None) if everything else np.array(self.layers)  # a slice spares a copy per request
        object.__setattr__(self, "_kept", kept)
        object.__setattr__(self, "_weights", self.idf[kept])

    @property
    def dimensions(self) -> int:
        """D: kept layers x experts."""
        return len(self.layers) * self.geometry.experts

    def apply(self, counts: Counts) -> Rows:
        """Signatures of one request or many.

        Args:
            counts: `[L, E]` or `[N, L, E]`.

        Returns:
            `[D]` or `[N, D]`, each row of length 1 or all zero.

        Raises:
            InputError: the counts are of another geometry.
        """
        shape = (self.geometry.layers, self.geometry.experts)
        if counts.shape[-2:] != shape or counts.ndim not in (2, 3):
            raise InputError(f"signature: counts of shape {counts.shape} are not of {self.geometry}")
        weighted = counts[..., self._kept, :].astype(np.float32)
        weighted *= self._weights
        rows: Rows = weighted.reshape(*counts.shape[:-2], self.dimensions)
        norms = np.sqrt(np.einsum("...d,...d->...", rows, rows))[..., None]
        np.divide(rows, norms, out=rows, where=norms > 0)
        return rows


def _check_layers(layers: tuple[int, ...], most: int) -> None:
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < most:
        raise InputError(f"signature: layers {_brief(layers)} are not ascending, distinct and below {most}")


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


def _brief(layers: tuple[int, ...]) -> str:
    text = str(list(layers))
    return text if len(text) <= 60 else f"{text[:57]}..."
