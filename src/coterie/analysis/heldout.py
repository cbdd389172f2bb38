"""Clusters judged on requests that they were not fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.activations import ActivationTrace
from coterie.analysis.correlation import Indices
from coterie.calibration import Profile, fit
from coterie.calibration.fit import Layers, Progress, values_of
from coterie.clustering.exact import UnitRows
from coterie.errors import InputError
from coterie.signature import Kind, Rows


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Requests at the nearest of centroids that others made.

    Attributes:
        profile: the centroids and their transform.
        fitted: requests of this trace that the centroids were fitted to; 0 if these were of another trace.
        requests: `[M]` positions of the judged requests in the trace, ascending.
        rows: `[M, D]` their signatures.
        nearest: `[M]` cluster of each: the one with the largest cosine, the first among equals.
        zero: requests that had to be left out, since their signature is zero and no centroid is near.
    """

    profile: Profile
    fitted: int
    requests: Indices
    rows: Rows
    nearest: Indices
    zero: int

    def pools(self) -> dict[str, Indices]:
        """Requests of each cluster, by its number."""
        return {str(k): self.requests[self.nearest == k] for k in range(self.profile.clusters)}


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """One cluster of judged requests.

    Attributes:
        size: requests nearest to its centroid.
        label: their most frequent label, the first in the alphabet among equals; empty if none has a label.
        share: share of the cluster's requests with that label.
    """

    size: int
    label: str
    share: float


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What held-out clusters look like.

    Attributes:
        model: model that the centroids were fitted to.
        kind: kind of the signatures.
        layers: layers they are made of.
        fitted: requests that the centroids were fitted to; 0 if these were of another trace.
        assigned: requests that were judged.
        zero: requests left out because their signature is zero.
        clusters: each cluster; sizes are not balanced, since each request is at its nearest centroid.
        largest_over_mean: size of the largest cluster over the mean size.
        purity: share of the judged requests that have their cluster's most frequent label; None without labels.
        purity_of_one: share of the most frequent label among all of them, which is the purity of a single cluster.
    """

    model: str
    kind: Kind
    layers: tuple[int, ...]
    fitted: int
    assigned: int
    zero: int
    clusters: tuple[ClusterSummary, ...]
    largest_over_mean: float
    purity: float | None
    purity_of_one: float | None


def hold_out(
    trace: ActivationTrace,
    clusters: int,
    rng: np.random.Generator,
    *,
    kind: Kind = "count_idf",
    layers: Layers = "greedy",
    progress: Progress = lambda _: None,
) -> HeldOut:
    """Fit one half of a trace and put the other half to the nearest centroid.

    Args:
        trace: N requests, all of them completely counted.
        clusters: K.
        rng: source of the split and of the fit's seed.
        kind: see `calibration.fit`.
        layers: see `calibration.fit`.
        progress: see `calibration.fit`.

    Raises:
        InputError: the half is too small for K clusters, or see `calibration.fit`.
    """
    if len(trace) // 2 < clusters:
        raise InputError(
            f"clusters: one half of {len(trace)} requests cannot make {clusters} clusters for the other half to be "
            "judged by; record more requests, or ask for fewer clusters (`--clusters`)"
        )
    order = rng.permutation(len(trace))
    train, test = np.sort(order[: len(trace) // 2]), np.sort(order[len(trace) // 2 :])
    seed = int(rng.integers(1 << 32))
    profile = fit(trace.select(train), clusters, seed=seed, kind=kind, layers=layers, progress=progress)
    return _nearest(trace, profile, test, fitted=len(train))


def judge(trace: ActivationTrace, profile: Profile) -> HeldOut:
    """Put all requests of a trace to the nearest centroid of a profile that was fitted to another trace.

    Raises:
        InputError: the profile is of another geometry, or reads what the trace lacks.
    """
    if profile.geometry != trace.geometry:
        raise InputError(f"the profile is of a model with {profile.geometry}, the trace of one with {trace.geometry}")
    return _nearest(trace, profile, np.arange(len(trace)), fitted=0)


def _nearest(trace: ActivationTrace, profile: Profile, requests: Indices, fitted: int) -> HeldOut:
    rows = profile.transform.apply(values_of(trace, profile.transform.kind)[requests])
    directed = rows.any(axis=1)
    rows = rows[directed]
    nearest = UnitRows("row", rows).cosines(profile.centroids).argmax(axis=1)
    return HeldOut(profile, fitted, requests[directed], rows, nearest, int((~directed).sum()))


def report_clusters(held: HeldOut, labels: Sequence[str]) -> ClusterReport:
    """Sizes and purity of held-out clusters.

    Args:
        held: the clusters.
        labels: `[N]` labels of the trace.

    Raises:
        InputError: no request is left to judge.
    """
    if not len(held.requests):
        raise InputError("clusters: all signatures are zero; no request has a nearest centroid")
    names = [labels[i] for i in held.requests]
    members = ([names[i] for i in np.flatnonzero(held.nearest == k)] for k in range(held.profile.clusters))
    clusters = tuple(_summary(some) for some in members)
    sizes = [cluster.size for cluster in clusters]
    whole = _summary(names)
    purity = sum(cluster.share * cluster.size for cluster in clusters) / len(names)
    return ClusterReport(
        model=held.profile.model,
        kind=held.profile.transform.kind,
        layers=held.profile.transform.layers,
        fitted=held.fitted,
        assigned=len(names),
        zero=held.zero,
        clusters=clusters,
        largest_over_mean=max(sizes) * len(sizes) / len(names),
        purity=purity if whole.label else None,
        purity_of_one=whole.share if whole.label else None,
    )


def _summary(names: Sequence[str]) -> ClusterSummary:
    label = max(sorted(set(names) - {""}), key=names.count, default="")
    return ClusterSummary(len(names), label, names.count(label) / len(names) if label else 0.0)
