"""What a request costs besides experts, learned from the times between tokens that workers are seen to give."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

PRIOR_PER_REQUEST = 0.03
"""Before anything is measured: of the time of the experts that one token chooses.

While decoding is bound by memory, experts cost their weights and a request its KV: at 48 layers, top-8 and experts of
9.4 MB a token alone reads 3.6 GB of experts, and 1000 tokens of context 0.1 GB.
"""

_PRIOR_FIXED = 1.0
_PRIOR_WEIGHT = 1.0
_REMEMBERED = 1000
_EVERY = 16
_OUTLIER = 3.0
_LEAST = 1e-3

_Three = npt.NDArray[np.float64]


class Seen(NamedTuple):
    """Integrals over time at one worker, until a moment.

    Attributes:
        time_s: the moment.
        requests: request-seconds.
        active: expert-seconds.
    """

    time_s: float
    requests: float
    active: float


class Meter:
    """Integrates a worker's requests and active experts over time."""

    def __init__(self) -> None:
        self._seen = Seen(0.0, 0.0, 0.0)

    def advance(self, now_s: float, requests: float, active: float) -> Seen:
        """Go on to `now_s`.

        Args:
            now_s: not before the last call's.
            requests: in flight since the last call.
            active: experts that they activate.
        """
        last = self._seen
        passed_s = now_s - last.time_s
        self._seen = Seen(now_s, last.requests + passed_s * requests, last.active + passed_s * active)
        return self._seen


class StepModel:
    """Step time as a fixed part, one for each request and one for each active expert; only ratios are of use.

        step_s = s (a + b * requests + active),   a, b >= 0

    Each request that is over gives one observation: its mean time between tokens, and the means over its life of the
    requests and the expected active experts of its worker.  The constants have the least sum of squared relative errors
    over about the last 1000 observations; those that are off by more than three times the usual error count less, in
    proportion.  A prior of the weight of one observation holds the three terms' shares to those of a worker bound by
    memory, as far as observations in which they grow together do not tell them apart.  They are solved for anew
    after each 16.  The prior is also the least that b can be: no engine serves a request for nothing, and where steps
    grow faster in large batches than in small ones, a straight line through all would say so.

    Source: the form is `latency.StepTime`; weights of outliers as in Huber, "Robust Estimation of a Location Parameter"
    (1964).

    Args:
        experts_per_token: (layer, expert) pairs that one token chooses.

    Attributes:
        per_request: b, the time of one more request in times of one more active expert.
        observations: how many there were.
    """

    def __init__(self, experts_per_token: int) -> None:
        self._prior = np.array([_PRIOR_FIXED, PRIOR_PER_REQUEST, 1.0]) * (experts_per_token, experts_per_token, 1)
        self._squares = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._weight = 0.0
        self._constants: _Three | None = None
        self._new: list[tuple[float, float, float]] = []  # observations, until they are taken in together
        self._error = 1.0
        self.per_request = float(self._prior[1])
        self.observations = 0

    def observe(self, begun: Seen, ended: Seen, step_s: float) -> None:
        """Take in a request that is over.

        Args:
            begun: its worker's integrals when it began.
            ended: when it ended.
            step_s: mean time between its tokens.
        """
        life_s = ended.time_s - begun.time_s
        if not (life_s > 0 and step_s > 0):
            return
        requests, active = ended.requests - begun.requests, ended.active - begun.active
        self._new.append((1 / step_s, requests / life_s / step_s, active / life_s / step_s))
        self.observations += 1
        if len(self._new) == _EVERY:
            self._take_in(np.array(self._new))
            self._new.clear()
            self._solve()

    def _take_in(self, rows: npt.NDArray[np.float64]) -> None:
        """Take in rows `[n, 3]`, oldest first, whose products with the constants should be 1."""
        weights = np.ones(len(rows)) if self._constants is None else self._weigh(abs(rows @ self._constants - 1))
        kept = (1 - 1 / _REMEMBERED) ** np.arange(len(rows), -1, -1)  # first, of what there was before
        weighed = (weights * kept[1:])[:, None] * rows
        self._squares = kept[0] * self._squares + weighed.T @ rows
        self._sums = kept[0] * self._sums + weighed.sum(axis=0)
        self._weight = float(kept[0] * self._weight + weights @ kept[1:])

    def _weigh(self, errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Weights of rows that are off by so much, oldest first."""
        weights = []
        for error in errors.tolist():
            weights.append(min(1.0, _OUTLIER * self._error / error) if error else 1.0)
            self._error += (min(error, _OUTLIER * self._error) - self._error) / 100
        return np.array(weights)

    def _solve(self) -> None:
        scale = (self._prior @ self._sums) / (self._prior @ self._squares @ self._prior)
        prior = scale * self._prior
        hold = _PRIOR_WEIGHT / self._weight * np.diag(np.diagonal(self._squares))
        factor = np.linalg.cholesky(self._squares + hold)
        self._constants, _ = nnls(factor.T, np.linalg.solve(factor, self._sums + hold @ prior))
        learned = float(self._constants[1] / max(self._constants[2], _LEAST * prior[2]))
        self.per_request = max(learned, float(self._prior[1]))
