"""Load in tokens: how long each request will share its steps with those that are there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.core import Decision, RouteRequest, Served, WorkerState
from coterie.routing.ledger import Lease
from coterie.routing.load import NOTHING

FIRST_STEP_S = 0.02
"""Time of a step before any was measured."""

_REMEMBERED = 100
_ROOM = 64


class LeastTokens:
    """Least tokens together.

        remaining[i] = max(1, output tokens of request i - (now - its begin) / step_s)
        together[k]  = sum over requests i of worker k of min(remaining[i], output tokens of the new one)
        worker       = argmin together

    Two requests on one worker make each other's steps longer for as long as both decode, which is the shorter of what
    they have left: `together` counts these tokens, for the new request and for those that it joins alike.  Where all
    outputs are of one length it prefers workers whose requests will soon be over.  Ties go to the fewest requests, then
    to the least recently assigned.

    Output tokens are the client's limit, or the gateway's default; a limit that outputs do not reach tells nothing, and
    the policy is then no better than `least_load`.  `step_s` is the mean time between two tokens, of the last hundred
    requests or so that were served to the end, and now is the time of the last assignment or release.

    It follows the ledger (`Watcher`).

    Args:
        targets: all workers that may ever be chosen from, in the gateway's order.
    """

    name = "least_tokens"
    reads = NOTHING

    def __init__(self, targets: Sequence[WorkerState]) -> None:
        self._place = {target.name: k for k, target in enumerate(targets)}
        self._held = _Held()
        self._step_s, self._measured = FIRST_STEP_S, 0
        self._now_s = 0.0

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the worker where the request shares the fewest tokens."""
        tokens = self._held.remaining(self._now_s, self._step_s)
        np.minimum(tokens, max(request.output_tokens, 1), out=tokens)
        together = np.bincount(self._held.places, tokens, minlength=len(self._place)).tolist()
        loads = [together[self._place[worker.name]] for worker in workers]
        best = min(zip(loads, workers, strict=True), key=lambda one: (one[0], one[1].requests, one[1].assigned))[1]
        return Decision(
            best.name,
            "least tokens",
            scores=tuple((worker.name, -load) for worker, load in zip(workers, loads, strict=True)),
        )

    def leased(self, lease: Lease, now_s: float) -> None:
        """See `Watcher.leased`."""
        self._now_s = now_s
        self._held.add(lease, self._place[lease.worker], now_s)

    def released(self, lease: Lease, served: Served | None, now_s: float) -> None:
        """See `Watcher.released`."""
        self._now_s = now_s
        self._held.remove(lease)
        if served is not None and served.step_s:
            self._measured = min(self._measured + 1, _REMEMBERED)
            self._step_s += (served.step_s - self._step_s) / self._measured


class _Held:
    """The requests in flight as columns: worker, begin in seconds, output tokens.  The last fills a gap."""

    def __init__(self) -> None:
        self._columns = np.empty((3, _ROOM))
        self._position: dict[Lease, int] = {}
        self._leases: list[Lease] = []

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """`[requests]` the worker of each."""
        return self._columns[0, : len(self._leases)].astype(np.int64)

    def remaining(self, now_s: float, step_s: float) -> npt.NDArray[np.float64]:
        """`[requests]` output tokens that each is expected to have left, at least one."""
        _, begins, tokens = self._columns[:, : len(self._leases)]
        left: npt.NDArray[np.float64] = np.maximum(tokens - (now_s - begins) / step_s, 1.0)
        return left

    def add(self, lease: Lease, place: int, now_s: float) -> None:
        """A request came."""
        number = len(self._leases)
        if number == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._columns[:, number] = place, now_s, max(lease.request.output_tokens, 1)
        self._position[lease] = number
        self._leases.append(lease)

    def remove(self, lease: Lease) -> None:
        """It is over."""
        position, last = self._position.pop(lease), self._leases.pop()
        if last is not lease:
            self._columns[:, position] = self._columns[:, len(self._leases)]
            self._position[last] = position
            self._leases[position] = last
