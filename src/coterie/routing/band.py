"""How much similarity is given up for less load: by a width, or by what both are worth at the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.core import Decision, WorkerState
from coterie.errors import ConfigError
from coterie.routing.policy import least_loaded

DEFAULT_TAU = 0.1

Scored = Sequence[tuple[WorkerState, float]]
"""Workers with the similarity of the request to each; at least one."""

Pick = Callable[[Scored], Decision]


class Band:
    """The least loaded of those that are nearly as similar as the most similar.

        band   = {k : score[k] >= max(score) - tau}
        worker = argmin requests over the band

    Source: ELDR section 1.3.

    Args:
        tau: width of the band, 0 to 2.

    Raises:
        ConfigError: tau is out of range.
    """

    def __init__(self, tau: float) -> None:
        if not 0 <= tau <= 2:
            raise ConfigError(f"tau must be from 0 to 2, got {tau}; {DEFAULT_TAU} is a good start")
        self._tau = tau

    def __call__(self, scored: Scored) -> Decision:
        """Choose."""
        least = max(score for _, score in scored) - self._tau
        band = [worker for worker, score in scored if score >= least]
        names = tuple(worker.name for worker in band)
        return Decision(least_loaded(band).name, "locality band", scores=_named(scored), candidates=names)


def adaptive_band(scored: Scored) -> Decision:
    """Trade similarity for load, each in units of its own mean.

        lead[k] = (score[k] - mean score) / (max score - mean score)    1 for the most similar, 0 on average
        load[k] = (requests[k] + 1) / (mean requests + 1)               1 on average
        worker  = argmax lead - 2 load

    Load counts twice: a request waits for those that are there, and they wait for it.  So a whole lead in similarity
    is worth half the mean load.  A worker is preferred to the most similar one, m, if it lacks less similarity than

        tau[k] = 2 (max score - mean score) (load[m] - load[k])

    which is a band whose width the moment sets: none where loads are even, wide where the most similar worker is
    overloaded, in proportion to how sure the request's place is.  Two workers that are nearly the same to a request
    are told apart by load alone.  Ties go to the fewer requests, then to the least recently assigned; with equal
    scores it is least load.
    """
    mean_score = sum(score for _, score in scored) / len(scored)
    mean_load = sum(worker.requests for worker, _ in scored) / len(scored) + 1
    spread = max(score for _, score in scored) - mean_score

    def cost(one: tuple[WorkerState, float]) -> tuple[float, int, int, str]:
        worker, score = one
        lead = (score - mean_score) / spread if spread > 0 else 0.0
        return 2 * (worker.requests + 1) / mean_load - lead, worker.requests, worker.assigned, worker.name

    return Decision(min(scored, key=cost)[0].name, "adaptive band", scores=_named(scored))


def _named(scored: Scored) -> tuple[tuple[str, float], ...]:
    return tuple((worker.name, score) for worker, score in scored)
