"""Expert locality: requests that use the same experts decode together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.calibration import Profile
from coterie.core import Decision, RouteRequest, WorkerState
from coterie.errors import ConfigError, ProfileError
from coterie.routing.load import load_only
from coterie.routing.policy import Reads, least_loaded

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
        if not 0 <= tau <= 2:
            raise ConfigError(f"tau must be from 0 to 2, got {tau}; {DEFAULT_TAU} is a good start")
        groups = groups_of(targets)
        if profile.clusters != len(groups):
            raise ProfileError(
                f"the profile has {profile.clusters} centroids for {len(groups)} decode groups; "
                f"fit it again with `coterie fit --clusters {len(groups)}`, "
                "`coterie serve --on-mismatch load` routes by load alone meanwhile"
            )
        if profile.transform.reads != "counts":
            raise ProfileError(
                f"the profile's signatures are made of {profile.transform.kind}, and engines report only counts; "
                "fit it again with `coterie fit --transform count_idf`"
            )
        self._profile = profile
        self._position = {group: k for k, group in enumerate(groups)}
        self._tau = tau

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the least loaded worker of the groups in the band."""
        counts = request.counts
        if counts is None:
            return load_only(workers, "no counts", request.counts_problem or "")
        if counts.geometry != self._profile.geometry:
            return load_only(workers, "other geometry", f"{counts.geometry}; profile: {self._profile.geometry}")
        if not counts.complete:
            return load_only(workers, "partial counts", f"{counts.covered} of {counts.tokens} prompt tokens")
        signature = self._profile.transform.apply(counts.counts)
        if not signature.any():
            return load_only(workers, "zero signature")
        similarity = (self._profile.centroids @ signature).tolist()
        scores = [similarity[self._position[worker.group]] for worker in workers]
        least = max(scores) - self._tau
        band = [worker for worker, score in zip(workers, scores, strict=True) if score >= least]
        return Decision(
            least_loaded(band).name,
            "locality band",
            scores=tuple((worker.name, score) for worker, score in zip(workers, scores, strict=True)),
            candidates=tuple(worker.name for worker in band),
        )


def groups_of(targets: Sequence[WorkerState]) -> tuple[str, ...]:
    """Names of the targets' groups, in order of first appearance."""
    return tuple(dict.fromkeys(target.group for target in targets))
