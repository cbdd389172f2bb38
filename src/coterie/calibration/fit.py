"""From a trace to a profile."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.calibration.profile import Profile
from coterie.clustering import Labels, balanced_kmeans
from coterie.errors import InputError
from coterie.signature import Rows, SignatureTransform, fit_idf


def fit(trace: ActivationTrace, clusters: int, *, seed: int = 0, starts: int = 5) -> Profile:
    """Fit one centroid per decode group to the prompts of a trace (ELDR section 1.3).

    IDF weights, signatures over all layers, balanced spherical k-means.  Every request of the trace is
    used, or none: a request that cannot be is an error, never left out in silence.  In particular a prompt
    that was only partly counted is refused, for its signature describes another text.

    Args:
        trace: the recorded requests; labels are reported, never used.
        clusters: number K of decode groups.
        seed: the same seed and trace give the same bytes.
        starts: seedings of the clustering to try; the most cohesive is kept.

    Raises:
        InputError: fewer requests than clusters, a partly counted prompt, or a prompt that used only experts
            that all prompts used.
    """
    if not 1 <= clusters <= len(trace):
        raise InputError(
            f"fit: {len(trace)} requests cannot make {clusters} clusters; "
            f"record at least {max(clusters, 1)} with `coterie collect`, or ask for 1 to {len(trace)} clusters"
        )
    _check_complete(trace)
    layers = tuple(range(trace.geometry.layers))
    transform = SignatureTransform(trace.geometry, layers, "count_idf", fit_idf(trace.prefill))
    rows = transform.apply(trace.prefill)
    _check_directions(rows)
    found = balanced_kmeans(rows, clusters, np.random.default_rng(seed), starts=starts)
    labels, shares = _dominant_labels(trace.labels, found.labels, clusters)
    return Profile(
        model=trace.model,
        transform=transform,
        centroids=found.centroids.astype(np.float32),
        sizes=np.bincount(found.labels, minlength=clusters),
        labels=labels,
        shares=shares,
        trace_digest=trace.digest(),
        seed=seed,
        cohesion=found.cohesion,
    )


def _check_complete(trace: ActivationTrace) -> None:
    partial = np.flatnonzero(~trace.complete)
    if partial.size:
        first = int(partial[0])
        raise InputError(
            f"fit: {partial.size} of {len(trace)} prompts were only partly counted (request {first}: "
            f"{trace.prefill_covered[first]} of {trace.prefill_tokens[first]} tokens); record them again on an "
            "engine that takes no KV cache from outside"
        )


def _check_directions(rows: Rows) -> None:
    zero = np.flatnonzero(~rows.any(axis=1))
    if zero.size:
        raise InputError(
            f"fit: {zero.size} of {len(rows)} signatures are zero (first: request {zero[0]}): these prompts used only "
            "experts that every prompt used; record more, and more different, prompts"
        )


def _dominant_labels(
    labels: tuple[str, ...], assigned: Labels, clusters: int
) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
    """The most frequent label of each cluster and its share; the first in the alphabet among equals."""
    names, shares = [], []
    for k in range(clusters):
        members = [labels[i] for i in np.flatnonzero(assigned == k)]
        counted = sorted(Counter(label for label in members if label).items(), key=lambda item: (-item[1], item[0]))
        name, count = counted[0] if counted else ("", 0)
        names.append(name)
        shares.append(count / max(len(members), 1))
    return tuple(names), np.array(shares, dtype=np.float32)
