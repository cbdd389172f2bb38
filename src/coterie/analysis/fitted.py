"""What a profile tells by itself, without a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.analysis.correlation import Floats
from coterie.calibration import Profile
from coterie.calibration.profile import Donor, ExpertLead, LayerChoice
from coterie.clustering.exact import UnitRows
from coterie.core import ModelGeometry
from coterie.quality import Rho
from coterie.signature import Kind

CHARACTER = 4


@dataclass(frozen=True, slots=True)
class FittedCluster:
    """One cluster of a profile.

    Attributes:
        size: requests that it was fitted to.
        label: their most frequent label; empty if none.
        share: share of them that have it.
        nearest: the cluster whose centroid is nearest to its own; None if it is the only one.
        cosine: the cosine between the two; None if it is the only one.
        experts: what sets it apart, see `Profile.characteristic_experts`.
    """

    size: int
    label: str
    share: float
    nearest: int | None
    cosine: float | None
    experts: tuple[ExpertLead, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ProfileInspection:
    """What a profile tells.

    Whether locality is worth routing for is not among it: a profile holds no decode counts, so nothing in it says how
    many experts a batch activates.

    Attributes:
        model: name of the model.
        geometry: L, E and top-k.
        trace_digest: identity of the trace that it was fitted to.
        seed: seed of the fit.
        kind: kind of its signatures.
        layers: layers they are made of.
        layer_choice: what greedy selection did; None where the layers were given.
        rho: rho on the trace that it was fitted to; None where it was not defined.
        rho_within_labels: the same over pairs with the same label.
        cohesion: mean cosine of a request to its centroid, on the requests that were fitted.
        purity: share of those requests that have their cluster's most frequent label; None without labels.
        clusters: each cluster.
        similarity: `[K, K]` cosines between centroids.
        donor: where the clusters were transferred from; None if from nowhere.
    """

    model: str
    geometry: ModelGeometry
    trace_digest: str
    seed: int
    kind: Kind
    layers: tuple[int, ...]
    layer_choice: LayerChoice | None
    rho: Rho | None
    rho_within_labels: Rho | None
    cohesion: float
    purity: float | None
    clusters: tuple[FittedCluster, ...]
    similarity: Floats
    donor: Donor | None


def inspect_profile(profile: Profile) -> ProfileInspection:
    """Describe a profile."""
    similarity = UnitRows("centroid", profile.centroids).cosines(profile.centroids)
    return ProfileInspection(
        model=profile.model,
        geometry=profile.geometry,
        trace_digest=profile.trace_digest,
        seed=profile.seed,
        kind=profile.transform.kind,
        layers=profile.transform.layers,
        layer_choice=profile.layer_choice,
        rho=profile.rho,
        rho_within_labels=profile.rho_within_labels,
        cohesion=profile.cohesion,
        purity=profile.purity if any(profile.labels) else None,
        clusters=tuple(_cluster(profile, k, similarity[k]) for k in range(profile.clusters)),
        similarity=similarity,
        donor=profile.donor,
    )


def _cluster(profile: Profile, k: int, similarity: Floats) -> FittedCluster:
    others = similarity.copy()
    others[k] = -np.inf
    nearest = int(others.argmax()) if profile.clusters > 1 else None
    return FittedCluster(
        size=int(profile.sizes[k]),
        label=profile.labels[k],
        share=float(profile.shares[k]),
        nearest=nearest,
        cosine=None if nearest is None else float(similarity[nearest]),
        experts=profile.characteristic_experts(k, CHARACTER),
    )
