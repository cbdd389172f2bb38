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
from coterie.quality import Rho
from coterie.signature import Kind, SignatureTransform
from coterie.tensorfile import TensorFormat

_UNIT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What greedy layer selection did (`quality.select_layers`), on the pairs that it selected with.

    Attributes:
        rho_of_kept: rho of the layers that it kept, the peak of its curve.
        rho_of_all: rho of all layers; None where it is not defined.
    """

    rho_of_kept: float
    rho_of_all: float | None


@dataclass(frozen=True, slots=True)
class Donor:
    """The other model whose clusters a transferred profile started from.

    Attributes:
        model: name of that model.
        trace_digest: `ActivationTrace.digest` of the trace that its profile was fitted to.
    """

    model: str
    trace_digest: str


@dataclass(frozen=True, slots=True)
class ExpertLead:
    """How far an expert's weight in one cluster's centroid is above its mean weight in the others.

    Attributes:
        layer: position among the model's MoE layers.
        expert: position among the layer's routed experts.
        lead: difference of the two weights.
    """

    layer: int
    expert: int
    lead: float


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    geometry: ModelGeometry
    transform: Kind
    layers: tuple[int, ...]
    label_names: tuple[str, ...]
    trace_digest: str
    seed: int
    cohesion: float
    rho: Rho | None
    rho_within_labels: Rho | None
    layer_choice: LayerChoice | None
    donor: Donor | None


_FORMAT = TensorFormat(
    name="profile",
    version=2,
    header=_Header,
    required=frozenset({"centroids", "sizes", "label_counts"}),
    optional=frozenset({"idf"}),
    most_bytes=1 << 30,
    error=ProfileError,
    remedy="make it with `coterie fit`",
)


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """One centroid per decode group, and the transform that makes signatures comparable to them.

    N, K and D below: requests of the trace, clusters, dimensions of a signature.

    Attributes:
        model: name of the model, as its server calls it.
        transform: counts (or gate sums) to signatures.
        centroids: `[K, D]` unit vectors, float32; row k belongs to the k-th decode group.
        sizes: `[K]` requests of the trace in each cluster, int64.
        label_names: the M labels of the trace's requests, ascending; the empty one is none.
        label_counts: `[K, M]` requests of each cluster that have each label, int64.  What is missing to `sizes` had
            none.
        trace_digest: `ActivationTrace.digest` of the trace.
        seed: seed of the fit.
        cohesion: mean cosine of a request to its centroid.
        rho: how well signatures tell which requests share experts in decode (`quality.signature_quality`), on
            pairs that played no part in the choice of layers; None where it is not defined.
        rho_within_labels: the same over those of the pairs that have the same label; None where it is not defined.
        layer_choice: what layer selection did; None where the layers were given.
        donor: where the clusters were transferred from; None where they were found in the trace alone.

    Raises:
        ProfileError: naming the field and what is wrong.
    """

    model: str
    transform: SignatureTransform
    centroids: npt.NDArray[np.float32]
    sizes: npt.NDArray[np.int64]
    label_names: tuple[str, ...]
    label_counts: npt.NDArray[np.int64]
    trace_digest: str
    seed: int
    cohesion: float
    rho: Rho | None = None
    rho_within_labels: Rho | None = None
    layer_choice: LayerChoice | None = None
    donor: Donor | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ProfileError("profile: the model's name is empty")
        if not self.clusters:
            raise ProfileError("profile: no clusters")
        _check_array("centroids", self.centroids, (self.clusters, self.transform.dimensions), "float32")
        _check_array("sizes", self.sizes, (self.clusters,), "int64")
        _check_array("label_counts", self.label_counts, (self.clusters, len(self.label_names)), "int64")
        self._check_values()
        self._check_labels()
        self._check_measures()

    def _check_values(self) -> None:
        lengths = np.linalg.norm(self.centroids.astype(np.float64), axis=1)
        wrong = np.flatnonzero(np.abs(lengths - 1) > _UNIT_TOLERANCE)
        if wrong.size:
            raise ProfileError(f"profile: centroid {wrong[0]} has length {lengths[wrong[0]]:.4g}, not 1")
        if self.sizes.min() < 0:
            raise ProfileError(f"profile: a cluster of {self.sizes.min()} requests")

    def _check_labels(self) -> None:
        names = self.label_names
        if "" in names or list(names) != sorted(set(names)):
            raise ProfileError("profile: label_names are not ascending, distinct and not empty")
        if self.label_counts.min(initial=0) < 0:
            raise ProfileError(f"profile: {self.label_counts.min()} requests of a label")
        wrong = np.flatnonzero(self.label_counts.sum(axis=1) > self.sizes)
        if wrong.size:
            raise ProfileError(f"profile: cluster {wrong[0]} has more labels than requests")

    def _check_measures(self) -> None:
        """All are cosines or correlations."""
        _check_figures("cohesion", self.cohesion)
        for name in ("rho", "rho_within_labels"):
            if rho := getattr(self, name):
                _check_figures(name, rho.value, rho.low, rho.high)
        if choice := self.layer_choice:
            _check_figures("layer_choice", choice.rho_of_kept, choice.rho_of_all)

    @property
    def geometry(self) -> ModelGeometry:
        """The model's routed part."""
        return self.transform.geometry

    @property
    def clusters(self) -> int:
        """K: number of centroids."""
        return len(self.sizes)

    @property
    def labels(self) -> tuple[str, ...]:
        """The most frequent label of each cluster, the first in the alphabet among equals; empty where it has none."""
        if not self.label_names:
            return ("",) * self.clusters
        most = self.label_counts.argmax(axis=1)
        return tuple(self.label_names[m] if row[m] else "" for m, row in zip(most, self.label_counts, strict=True))

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """`[K]` share of all of a cluster's requests, unlabelled ones too, that have its most frequent label."""
        shares: npt.NDArray[np.float64] = self.label_counts.max(axis=1, initial=0) / np.maximum(self.sizes, 1)
        return shares

    @property
    def purity(self) -> float:
        """Share of the trace's requests that have the most frequent label of their cluster."""
        return float(self.label_counts.max(axis=1, initial=0).sum()) / max(int(self.sizes.sum()), 1)

    def characteristic_experts(self, cluster: int, most: int = 10) -> tuple[ExpertLead, ...]:
        """What sets one cluster apart: the experts whose weight in its centroid leads the others' by most.

            lead[d] = centroid[k, d] - mean over j != k of centroid[j, d]

        Since scores are dot products, `lead[d]` is what one unit of coordinate d of a signature adds to the score of
        cluster k over the mean score of the others.  With one cluster it is the centroid itself.

        Args:
            cluster: k, from 0 to K - 1.
            most: how many to give at most.

        Returns:
            Those with a lead above 0, largest first; equal ones in the order of layer and expert.

        Raises:
            InputError: there is no such cluster.
        """
        if not 0 <= cluster < self.clusters:
            raise InputError(f"profile: no cluster {cluster} among {self.clusters}")
        own = self.centroids[cluster].astype(np.float64)
        others = np.delete(self.centroids, cluster, axis=0)
        lead = own - others.mean(axis=0, dtype=np.float64) if len(others) else own
        chosen = np.argsort(-lead, kind="stable")[:most]
        layers, experts = np.divmod(chosen, self.geometry.experts)
        return tuple(
            ExpertLead(self.transform.layers[layer], int(expert), float(lead[d]))
            for d, layer, expert in zip(chosen, layers, experts, strict=True)
            if lead[d] > 0
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to one safetensors file; what was there is replaced at once or not at all.

        Raises:
            ProfileError: the file cannot be written.
        """
        transform = self.transform
        header = _Header(
            model=self.model,
            geometry=transform.geometry,
            transform=transform.kind,
            layers=transform.layers,
            label_names=self.label_names,
            trace_digest=self.trace_digest,
            seed=self.seed,
            cohesion=self.cohesion,
            rho=self.rho,
            rho_within_labels=self.rho_within_labels,
            layer_choice=self.layer_choice,
            donor=self.donor,
        )
        arrays: dict[str, npt.NDArray[Any]] = {
            "centroids": self.centroids,
            "sizes": self.sizes,
            "label_counts": self.label_counts,
        }
        if transform.idf is not None:
            arrays["idf"] = transform.idf
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
            return cls(
                model=header.model,
                transform=SignatureTransform(header.geometry, header.layers, header.transform, arrays.pop("idf", None)),
                label_names=header.label_names,
                trace_digest=header.trace_digest,
                seed=header.seed,
                cohesion=header.cohesion,
                rho=header.rho,
                rho_within_labels=header.rho_within_labels,
                layer_choice=header.layer_choice,
                donor=header.donor,
                **arrays,
            )
        except InputError as error:
            raise _FORMAT.failure(path, error) from None


def _check_array(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape or array.dtype.name != dtype:
        raise ProfileError(f"profile: {name} has shape {array.shape} {array.dtype}, not {shape} {dtype}")
    if not np.isfinite(array).all():
        raise ProfileError(f"profile: {name} holds a value that is not finite")


def _check_figures(name: str, *figures: float | None) -> None:
    for figure in figures:
        if figure is not None and not -1.001 <= figure <= 1.001:  # NaN is not in there either
            raise ProfileError(f"profile: {name} holds {figure}, which is not from -1 to 1")
