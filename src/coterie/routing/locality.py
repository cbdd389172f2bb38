"""Expert locality: requests that use the same experts decode together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.calibration import Profile
from coterie.core import Decision, ModelGeometry, RouteRequest, WorkerState
from coterie.errors import ProfileError
from coterie.routing.band import DEFAULT_TAU, Band, Pick
from coterie.routing.load import load_only
from coterie.routing.partition import Partition
from coterie.routing.policy import Reads
from coterie.signature import SignatureTransform


class Locality:
    """The locality band.

        score[g] = <centroid[g], signature>            cosine, one centroid per decode group
        band     = {g : score[g] >= max(score) - tau}  over the groups with an available worker
        worker   = argmin requests over the workers of the band's groups

    The score says how much of the experts that the request will use its group already loads at each step; a
    step of decoding reads the union of its requests' experts once.  The band keeps load in the choice: groups
    whose scores differ by less than `tau` are as good as equal, so the least loaded of them is taken, ties to the
    least recently assigned.  With tau = 0 only the nearest group is left (and exact ties); with tau = 2 all are,
    and it is least load.

    Locality picks groups and load picks the worker: the data-parallel ranks of an expert-parallel group share
    its experts.  A group without an available worker is no candidate, and its requests go to the next nearest.

    Where the signal is missing the least loaded worker is taken, and the decision says why: no counts, counts
    of a part of the prompt, counts of another geometry, or a zero signature.

    Source: ELDR section 1.3 (the plain rule: a band of one group is not widened).

    Args:
        profile: the transform and the centroids; centroid k belongs to the k-th group among the targets.
        targets: all workers that may ever be chosen from, in the gateway's order.
        tau: width of the band, 0 to 2.

    Raises:
        ProfileError: the profile has another number of centroids than there are groups, or its signatures are made of
            what engines do not report.
        ConfigError: tau is out of range.
    """

    name = "locality"
    reads = frozenset({Reads.COUNTS})

    def __init__(self, profile: Profile, targets: Sequence[WorkerState], tau: float = DEFAULT_TAU) -> None:
        groups = groups_of(targets)
        if profile.clusters != len(groups):
            raise ProfileError(
                f"the profile has {profile.clusters} centroids for {len(groups)} decode groups; "
                f"fit it again with `coterie fit --clusters {len(groups)}`; meanwhile "
                "`coterie serve --decode-policy locality_refit` adapts it to the traffic, and "
                "`coterie serve --on-mismatch load` routes by load alone"
            )
        self._band = Band(tau)
        self._similarity = Similarity(profile.transform)
        self._partition = Partition(profile.centroids, {group: k for k, group in enumerate(groups)})

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the least loaded worker of the groups in the band."""
        return self._similarity.decide(request, workers, self._partition, self._band)


class Similarity:
    """How similar a request is to the centroid of each worker's group, whoever owns which at the time.

    Args:
        transform: counts to signatures.

    Raises:
        ProfileError: signatures are made of what engines do not report.
    """

    def __init__(self, transform: SignatureTransform) -> None:
        if transform.reads != "counts":
            raise ProfileError(
                f"the profile's signatures are made of {transform.kind}, and engines report only counts; "
                "fit it again with `coterie fit --transform count_idf`"
            )
        self._transform = transform

    def decide(
        self, request: RouteRequest, workers: Sequence[WorkerState], partition: Partition, pick: Pick
    ) -> Decision:
        """Let `pick` choose among the workers with a centroid; by load where there is no signal, or no such worker."""
        if missing := missing_signal(request, self._transform.geometry):
            return load_only(workers, *missing)
        assert request.counts is not None
        similarity = self._transform.similarities(request.counts.counts, partition.centroids)
        if similarity is None:
            return load_only(workers, "zero signature")
        row_of = partition.row_of
        scored = [(worker, similarity[row_of[worker.group]]) for worker in workers if worker.group in row_of]
        return pick(scored) if scored else load_only(workers, "no centroid")


def missing_signal(request: RouteRequest, geometry: ModelGeometry) -> tuple[str, str] | None:
    """Why a request has no signature under a profile of this geometry: a fixed phrase, and the particulars."""
    counts = request.counts
    if counts is None:
        return "no counts", request.counts_problem or ""
    if counts.geometry != geometry:
        return "other geometry", f"{counts.geometry}; profile: {geometry}"
    if not counts.complete:
        return "partial counts", f"{counts.covered} of {counts.tokens} prompt tokens"
    return None


def groups_of(targets: Sequence[WorkerState]) -> tuple[str, ...]:
    """Names of the targets' groups, in order of first appearance."""
    return tuple(dict.fromkeys(target.group for target in targets))
