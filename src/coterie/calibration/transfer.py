"""A profile for a new model from few of its prompts, with another model's clusters as a start."""

from __future__ import annotations

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration.fit import (
    Layers,
    Progress,
    Streams,
    check_requests,
    choose_transform,
    make_profile,
    measure_rho,
    signatures_of,
)
from coterie.calibration.profile import Donor, Profile
from coterie.clustering import Clustering, Labels, balanced_assignment, centroids_of, refit
from coterie.clustering.exact import UnitRows
from coterie.errors import InputError
from coterie.quality import DEFAULT_PAIRS, random_pairs
from coterie.signature import Kind, Rows

_UNSEEN = -1


def transfer(
    trace: ActivationTrace,
    donor_trace: ActivationTrace,
    donor: Profile,
    *,
    seed: int = 0,
    kind: Kind = "count_idf",
    layers: Layers = "all",
    rounds: int = 0,
    pairs: int = DEFAULT_PAIRS,
    progress: Progress = lambda _: None,
) -> Profile:
    """Fit a model's profile to few prompts, divided as another model's clusters divide them.

    Experts of two models have nothing to do with each other, but prompts that are alike for one are alike for the
    other.  So not centroids are carried over, but which prompts belong together:

    1. Assign the donor's requests to its centroids, with no cluster above its share
       (`clustering.balanced_assignment`).
    2. Each prompt of the new model that the donor ran too, by prompt hash, inherits its cluster there.
    3. The new centroids are the directions of the inherited groups' sums of signatures.  Prompts that the donor did
       not run go to the nearest one.
    4. On demand, `rounds` of balanced k-means over all the prompts of the new model go on from there
       (`clustering.refit`).  With few prompts they let go of what the donor knew; `bench/transfer.py` compares.

    Cluster k of the result is the donor's cluster k, so both models' decode groups can have the same order.

    Args:
        trace: few requests of the new model, all of which are used or none, as by `fit`.
        donor_trace: requests of the donor model, completely counted; among them prompts of `trace`.
        donor: profile of the donor model.
        seed: of the pairs that rho is measured on, and that layers are chosen by.
        kind: what the new signatures are made of; need not be the donor's.
        layers: see `Layers`.  All of them by default, since few prompts say little of single layers.
        rounds: rounds of clustering after the start; 0 keeps the donor's division.
        pairs: as for `fit`.
        progress: see `Progress`.

    Returns:
        A profile with as many clusters as the donor's; its `donor` says where they are from.

    Raises:
        InputError: the donor's trace is not of the donor profile's model, a cluster inherits no prompt, `rounds` is
            negative, or see `fit`.
    """
    if seed < 0 or rounds < 0:
        raise InputError(f"transfer: seed and rounds must not be negative, got {seed} and {rounds}")
    check_requests(trace, donor.clusters)
    progress("dividing prompts as the donor does")
    inherited = _inherit(trace, donor_trace, donor)
    streams = Streams.of(seed)
    progress("choosing layers" if layers == "greedy" else "weighing experts")
    transform, choice = choose_transform(trace, kind, layers, random_pairs(len(trace), pairs, streams.choice))
    rows = signatures_of(trace, transform)
    progress("clustering")
    found = _cluster(rows, inherited, donor.clusters, rounds)
    progress("measuring rho")
    rho, within = measure_rho(trace, rows, random_pairs(len(trace), pairs, streams.pairs), streams.intervals)
    about = {"seed": seed, "rho": rho, "rho_within_labels": within, "layer_choice": choice}
    return make_profile(trace, transform, found, donor=Donor(donor.model, donor.trace_digest), **about)


def _inherit(trace: ActivationTrace, donor_trace: ActivationTrace, donor: Profile) -> Labels:
    """`[N]` the donor's cluster of each prompt; `_UNSEEN` where the donor did not run it."""
    if (donor_trace.model, donor_trace.geometry) != (donor.model, donor.geometry):
        raise InputError(
            f"transfer: the donor's trace is of {donor_trace.model} ({donor_trace.geometry}), its profile of "
            f"{donor.model} ({donor.geometry}); give the trace that the profile was fitted to"
        )
    check_requests(donor_trace, donor.clusters)
    similarity = UnitRows("row", signatures_of(donor_trace, donor.transform)).cosines(donor.centroids)
    divided = balanced_assignment(similarity, -(-len(donor_trace) // donor.clusters))
    cluster_of: dict[str, int] = {}
    for prompt, k in zip(donor_trace.prompt_hashes, divided.tolist(), strict=True):
        cluster_of.setdefault(prompt, k)  # a prompt that the donor ran several times: its first run counts
    inherited = np.array([cluster_of.get(prompt, _UNSEEN) for prompt in trace.prompt_hashes], dtype=np.int64)
    _check_heirs(inherited, donor.clusters)
    return inherited


def _check_heirs(inherited: Labels, clusters: int) -> None:
    common = inherited[inherited != _UNSEEN]
    empty = np.flatnonzero(np.bincount(common, minlength=clusters) == 0)
    if empty.size:
        raise InputError(
            f"transfer: {len(common)} of {len(inherited)} prompts are in the donor's trace too, and none of them is in "
            f"{empty.size} of its {clusters} clusters (first: {empty[0]}); record more of the donor's prompts, "
            f"{4 * clusters} or more at random, or `coterie fit` without a donor"
        )


def _cluster(rows: Rows, inherited: Labels, clusters: int, rounds: int) -> Clustering:
    known = inherited != _UNSEEN
    centroids = centroids_of(rows[known], inherited[known], clusters)
    if rounds:
        return refit(rows, centroids, max_rounds=rounds)
    similarity = UnitRows("row", rows).cosines(centroids)
    labels = np.where(known, inherited, similarity.argmax(axis=1))
    cohesion = float(similarity[np.arange(len(rows)), labels].mean())
    return Clustering(centroids, labels, cohesion)
