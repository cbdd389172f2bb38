"""Expert locality: requests that use the same experts decode together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.calibration import Profile
from coterie.core import Decision, ModelGeometry, RouteRequest, WorkerState
from coterie.errors import ConfigError, ProfileError
from coterie.routing.load import load_only
from coterie.routing.partition import Partition
from coterie.routing.policy import Reads, least_loaded
from coterie.signature import SignatureTransform

DEFAULT_TAU = 0.1


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
        self._band = Band(profile.transform, tau)
        self._partition = Partition(profile.centroids, {group: k for k, group in enumerate(groups)})

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the least loaded worker of the groups in the band."""
        return self._band.choose(request, workers, self._partition)


class Band:
    """The rule of `Locality`, whoever owns which centroid at the time.

    Args:
        transform: counts to signatures.
        tau: width of the band, 0 to 2.

    Raises:
        ProfileError: signatures are made of what engines do not report.
        ConfigError: tau is out of range.
    """

    def __init__(self, transform: SignatureTransform, tau: float) -> None:
        if not 0 <= tau <= 2:
            raise ConfigError(f"tau must be from 0 to 2, got {tau}; {DEFAULT_TAU} is a good start")
        if transform.reads != "counts":
            raise ProfileError(
                f"the profile's signatures are made of {transform.kind}, and engines report only counts; "
                "fit it again with `coterie fit --transform count_idf`"
            )
        self._transform = transform
        self._tau = tau

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], partition: Partition) -> Decision:
        """Choose the least loaded worker of the groups in the band; a group without a centroid is no candidate."""
        if missing := missing_signal(request, self._transform.geometry):
            return load_only(workers, *missing)
        assert request.counts is not None
        signature = self._transform.apply(request.counts.counts)
        if not signature.any():
            return load_only(workers, "zero signature")
        similarity = (partition.centroids @ signature).tolist()
        row_of = partition.row_of
        scores = [(worker, similarity[row_of[worker.group]]) for worker in workers if worker.group in row_of]
        if not scores:
            return load_only(workers, "no centroid")
        least = max(score for _, score in scores) - self._tau
        band = [worker for worker, score in scores if score >= least]
        return Decision(
            least_loaded(band).name,
            "locality band",
            scores=tuple((worker.name, score) for worker, score in scores),
            candidates=tuple(worker.name for worker in band),
        )


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
