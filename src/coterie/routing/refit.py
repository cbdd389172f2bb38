"""Locality that follows the traffic and the pool: centroids refitted to the requests of the last seconds.

A state machine: it has no thread and reads no clock.  `coterie.routing.background` says who drives it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.calibration import Profile
from coterie.clustering import refit
from coterie.core import Counts, Decision, RouteRequest, Served, WorkerState
from coterie.errors import ConfigError
from coterie.routing.band import DEFAULT_TAU, Band, adaptive_band
from coterie.routing.drift import Gain, fit_again, held_out_gain
from coterie.routing.ledger import Lease
from coterie.routing.locality import Similarity, groups_of, missing_signal
from coterie.routing.partition import Partition, Rows, deal
from coterie.routing.policy import Reads
from coterie.signature import SignatureTransform

DEFAULT_WINDOW_S = 5.0

_LEAST = 8  # requests of the window for each centroid: halves of four, of which a direction can be told
_MOST = 32  # for each centroid: more would sharpen it little
_MOST_IN_ALL = 1024  # 12 MiB of counts of 48 x 128 experts
_log = logging.getLogger("coterie.routing")


class LocalityRefit:
    """The locality band over centroids that are refitted while it routes.

    *Window.*  The requests of the last `window_s` seconds, but at least the newest 8 for each centroid, however old:
    few requests make poor centroids.  And at most the newest 32 for each, or 1024 in all where those are fewer but no
    less than 8 for each: more make hardly better ones, and cost time and memory.

    *Refit.*  Every half window, new centroids are fitted to it, beginning at the present ones.  They are installed if
    requests that they were not fitted to are significantly nearer to them (`held_out_gain`), so chance alone
    replaces nothing.  Each group takes the new centroid that is most like its old one.

    *Pool.*  When groups are lost or join, the present centroids are dealt anew at once (`Partition.over`), and a refit
    is due as soon as the window suffices.  Where groups share a centroid because one has joined, new ones are installed
    whether they gain by that test or not; after a loss they must.  A profile of another number of centroids than there
    are groups is adapted in the same way.

    Everything else is as in `Locality`.  A request with no usable counts is not in the window.  A fit that fails is
    logged and counted, and the present centroids stay.

    Source: window, warm start and alignment as in ELDR's artifact, which refits a pool of fixed size and installs every
    fit; the test, the bounds of the window and the changes of the pool are our own.

    Args:
        profile: the transform, and the centroids to begin with.
        targets: all workers that may ever be chosen from, in the gateway's order.
        tau: width of the band, 0 to 2; None for `adaptive_band`, under the name `locality_adaptive`.
        window_s: how far back the window reaches.

    Raises:
        ProfileError: the profile's signatures are made of what engines do not report.
        ConfigError: tau is out of range, or window_s is not above zero.
    """

    reads = frozenset({Reads.COUNTS})

    def __init__(
        self,
        profile: Profile,
        targets: Sequence[WorkerState],
        tau: float | None = DEFAULT_TAU,
        window_s: float = DEFAULT_WINDOW_S,
    ) -> None:
        if not 0 < window_s < math.inf:
            raise ConfigError(f"the window of refits must be above zero seconds, got {window_s}")
        self.name = "locality_adaptive" if tau is None else "locality_refit"
        self._pick = adaptive_band if tau is None else Band(tau)
        self._similarity = Similarity(profile.transform)
        self._transform = profile.transform
        self._partition = deal(profile.centroids, profile.sizes, groups_of(targets))
        self._window = Window(window_s, len(self._partition.groups))
        self._interval_s = window_s / 2
        self._running = False
        self._next_s = -math.inf
        self._installed_s: float | None = None
        self._gain: Gain | None = None
        self._fits: Counter[str] = Counter(dict.fromkeys(("installed", "no_gain", "outdated", "failed"), 0))

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose a worker by its similarity and load."""
        return self._similarity.decide(request, workers, self._partition, self._pick)

    def leased(self, lease: Lease, now_s: float) -> None:
        """See `Watcher.leased`: the request enters the window."""
        counts = lease.request.counts
        if counts is not None and not missing_signal(lease.request, self._transform.geometry):
            self._window.add(counts.counts, now_s)

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        """See `Watcher.released`: nothing changes."""

    # --- beside the decisions ---

    def due(self, workers: Sequence[WorkerState], now_s: float) -> RefitJob | None:
        """See `Background.due`."""
        groups = groups_of([worker for worker in workers if worker.available])
        if groups and groups != self._partition.groups:
            self._repartition(groups, workers)
        if self._running or now_s < self._next_s:
            return None
        counts = self._window.take(now_s)
        if counts is None:
            return None
        self._running, self._next_s = True, now_s + self._interval_s
        return RefitJob(self._transform, counts, self._partition, certain=self._partition.shared)

    def install(self, outcome: RefitOutcome, now_s: float) -> None:
        """See `Background.install`: one reference is swapped, so every decision sees the old or the new centroids."""
        self._running = False
        self._gain = outcome.gain or self._gain
        self._fits[self._verdict(outcome)] += 1
        if outcome.problem is not None:
            _log.error("refit failed, the present centroids stay: %s", outcome.problem)
        elif outcome.found is not None and outcome.begun_at is self._partition:
            self._partition = outcome.found
            self._installed_s = now_s

    def figures(self, now_s: float) -> dict[str, float]:
        """See `Shown.figures`.

        `refit_gain` and its standard error are those of the last test (`Gain`), `refit_window_requests` what the window
        holds, and `centroids_age_seconds` the time since centroids were installed; what there is none of is left out.
        """
        found: dict[str, float] = {f"refits_{verdict}_total": count for verdict, count in self._fits.items()}
        found["refit_window_requests"] = len(self._window)
        found["centroids"] = len(self._partition.centroids)
        if self._gain is not None:
            found |= {"refit_gain": self._gain.mean, "refit_gain_error": self._gain.error}
        if self._installed_s is not None:
            found["centroids_age_seconds"] = now_s - self._installed_s
        return found

    def _repartition(self, groups: Sequence[str], workers: Sequence[WorkerState]) -> None:
        requests: Counter[str] = Counter()
        for worker in workers:
            requests[worker.group] += worker.requests
        self._partition = self._partition.over(groups, requests)
        self._window.centroids = len(groups)
        self._next_s = -math.inf

    def _verdict(self, outcome: RefitOutcome) -> str:
        if outcome.problem is not None:
            return "failed"
        if outcome.begun_at is not self._partition:
            return "outdated"  # the pool changed meanwhile; another fit is due
        return "no_gain" if outcome.found is None else "installed"


@dataclass(frozen=True, slots=True, eq=False)
class RefitOutcome:
    """What a refit found.

    Attributes:
        begun_at: the partition that it was to replace.
        found: what is to replace it; None where it stays.
        gain: on held-out requests, where it was tested.
        problem: why the fit failed, if it did.
    """

    begun_at: Partition
    found: Partition | None = None
    gain: Gain | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RefitJob:
    """Fit centroids to a window of requests.

    Attributes:
        transform: counts to signatures.
        counts: of the requests in order of arrival, each `[L, E]`.
        present: the partition to begin at.
        certain: whether new centroids are wanted whatever they gain.
    """

    transform: SignatureTransform
    counts: tuple[Counts, ...]
    present: Partition
    certain: bool

    def run(self) -> RefitOutcome:
        """See `Job.run`; it takes no chance."""
        try:
            return self._fit()
        except Exception as error:  # whatever is wrong with a window, routing goes on
            return RefitOutcome(self.present, problem=f"{type(error).__name__}: {error}")

    def _fit(self) -> RefitOutcome:
        signatures = np.stack([self.transform.apply(counts) for counts in self.counts])
        signatures = signatures[signatures.any(axis=1)]
        seeds = self.present.seeds(signatures)
        if self.certain:
            return RefitOutcome(self.present, self._owned(refit(signatures, seeds).centroids))
        gain = held_out_gain(signatures, seeds)
        found = self._owned(fit_again(signatures, seeds)) if gain.significant else None
        return RefitOutcome(self.present, found, gain)

    def _owned(self, centroids: Rows) -> Partition:
        return Partition(centroids.astype(np.float32), {group: k for k, group in enumerate(self.present.groups)})


class Window:
    """Counts of the requests of the last seconds, within bounds for each centroid.

    Args:
        seconds: how far back it reaches.
        centroids: how many are to be fitted.

    Attributes:
        centroids: the same; may be changed.
    """

    def __init__(self, seconds: float, centroids: int) -> None:
        self.centroids = centroids
        self._seconds = seconds
        self._requests: deque[tuple[float, Counts]] = deque()
        self._fresh = False

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, counts: Counts, now_s: float) -> None:
        """A request was assigned."""
        self._requests.append((now_s, counts))
        self._fresh = True
        most = max(self._least, min(_MOST * self.centroids, _MOST_IN_ALL))
        while len(self._requests) > most:
            self._requests.popleft()

    def take(self, now_s: float) -> tuple[Counts, ...] | None:
        """The requests, oldest first; None where there are too few for a fit, or none is new since the last time."""
        while len(self._requests) > self._least and self._requests[0][0] < now_s - self._seconds:
            self._requests.popleft()
        if not self._fresh or len(self._requests) < self._least:
            return None
        self._fresh = False
        return tuple(counts for _, counts in self._requests)

    @property
    def _least(self) -> int:
        return _LEAST * self.centroids
