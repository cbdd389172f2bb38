"""The routing profile: what `fit` learns from a trace and `locality` routes by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.core import ModelGeometry
from coterie.errors import InputError, ProfileError
from coterie.signature import Kind, SignatureTransform
from coterie.tensorfile import TensorFormat

TRANSFORM: Kind = "count_idf"
_UNIT_TOLERANCE = 1e-3


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    geometry: ModelGeometry
    transform: str
    layers: tuple[int, ...]
    labels: tuple[str, ...]
    trace_digest: str
    seed: int
    cohesion: float


_FORMAT = TensorFormat(
    name="profile",
    version=1,
    header=_Header,
    required=frozenset({"idf", "centroids", "sizes", "shares"}),
    optional=frozenset(),
    most_bytes=1 << 30,
    error=ProfileError,
    remedy="make it with `coterie fit`",
)


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """One centroid per decode group, and the transform that makes signatures comparable to them.

    Attributes:
        model: name of the model, as its server calls it.
        transform: counts to signatures.
        centroids: `[K, D]` unit vectors, float32; row k belongs to the k-th decode group.
        sizes: `[K]` requests of the trace in each cluster.
        labels: the most frequent label of each cluster; empty where its requests had none.
        shares: `[K]` share of the cluster's requests that have that label, float32.
        trace_digest: `ActivationTrace.digest` of the trace.
        seed: seed of the fit.
        cohesion: mean cosine of a request to its centroid.

    Raises:
        ProfileError: naming the field and what is wrong.
    """

    model: str
    transform: SignatureTransform
    centroids: npt.NDArray[np.float32]
    sizes: npt.NDArray[np.int64]
    labels: tuple[str, ...]
    shares: npt.NDArray[np.float32]
    trace_digest: str
    seed: int
    cohesion: float

    def __post_init__(self) -> None:
        if not self.model:
            raise ProfileError("profile: the model's name is empty")
        _check_array("centroids", self.centroids, (self.clusters, self.transform.dimensions), "float32")
        _check_array("sizes", self.sizes, (self.clusters,), "int64")
        _check_array("shares", self.shares, (self.clusters,), "float32")
        self._check_values()

    def _check_values(self) -> None:
        lengths = np.linalg.norm(self.centroids.astype(np.float64), axis=1)
        wrong = np.flatnonzero(np.abs(lengths - 1) > _UNIT_TOLERANCE)
        if wrong.size:
            raise ProfileError(f"profile: centroid {wrong[0]} has length {lengths[wrong[0]]:.4g}, not 1")
        if self.sizes.min() < 0:
            raise ProfileError(f"profile: a cluster of {self.sizes.min()} requests")
        if self.shares.min() < 0 or self.shares.max() > 1:
            raise ProfileError("profile: a share of a label is outside 0..1")
        if not -1.001 <= self.cohesion <= 1.001:
            raise ProfileError(f"profile: cohesion {self.cohesion} is not a mean of cosines")

    @property
    def geometry(self) -> ModelGeometry:
        """The model's routed part."""
        return self.transform.geometry

    @property
    def clusters(self) -> int:
        """K: number of centroids."""
        return len(self.labels)

    @property
    def purity(self) -> float:
        """Share of the trace's requests that have the most frequent label of their cluster."""
        return float(self.sizes @ self.shares) / max(int(self.sizes.sum()), 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to one safetensors file; what was there is replaced at once or not at all.

        Raises:
            ProfileError: the file cannot be written.
        """
        transform = self.transform
        assert transform.idf is not None
        header = _Header(
            model=self.model,
            geometry=transform.geometry,
            transform=TRANSFORM,
            layers=transform.layers,
            labels=self.labels,
            trace_digest=self.trace_digest,
            seed=self.seed,
            cohesion=self.cohesion,
        )
        arrays: dict[str, npt.NDArray[Any]] = {
            "idf": transform.idf,
            "centroids": self.centroids,
            "sizes": self.sizes,
            "shares": self.shares,
        }
        _FORMAT.write(path, header, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile.

        Raises:
            ProfileError: naming the file, what is wrong with it and the remedy: missing, truncated, alien, of
                another schema version, or inconsistent.
        """
        header, arrays = _FORMAT.read(path)
        try:
            if header.transform != TRANSFORM:
                raise ProfileError(f"profile: transform {header.transform[:60]!r} is not {TRANSFORM}")
            transform = SignatureTransform(header.geometry, header.layers, TRANSFORM, arrays.pop("idf"))
            return cls(
                header.model,
                transform,
                labels=header.labels,
                trace_digest=header.trace_digest,
                seed=header.seed,
                cohesion=header.cohesion,
                **arrays,
            )
        except InputError as error:
            raise _FORMAT.failure(path, error) from None


def _check_array(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape or array.dtype.name != dtype or 0 in shape:
        raise ProfileError(f"profile: {name} has shape {array.shape} {array.dtype}, not {shape} {dtype}")
    if not np.isfinite(array).all():
        raise ProfileError(f"profile: {name} holds a value that is not finite")
