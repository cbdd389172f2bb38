"""Prefill routing: prompts that begin alike go to one prefill worker, whose KV cache then holds the beginning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from coterie.core import Decision, RouteRequest, WorkerState
from coterie.routing.bound import load_bound
from coterie.routing.load import NOTHING, load_only

PREFIX_BYTES = 1024
"""How much of a prompt is its key."""

_VIRTUAL_NODES = 160


class Prefix:
    """Consistent hashing with bounded loads.

        key    = BLAKE2b-64 of the prompt's first 1024 bytes
        bound  = 1.25 * (sum of requests + 1) / n
        worker = first on the ring from the key with requests <= bound

    Each worker has 160 points on a ring of 2^64, so that keys spread evenly and a worker that leaves hands its
    keys to all others.  Unavailable workers are passed over and count neither in the sum nor in n.  A worker
    above the bound is passed over too, and the *next on the ring* takes the request rather than the least
    loaded: the overflow of a popular prefix then always goes to the same second worker, which soon has it
    cached as well.  The bound exceeds the mean, so some worker is always under it.

    An empty prefix goes to the least loaded worker, and the decision says so.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018); key, points and
    factor as in ELDR section 1.3, which sends the overflow to the least loaded.

    Args:
        targets: all workers that may ever be chosen from.
    """

    name = "prefix"
    reads = NOTHING

    def __init__(self, targets: Sequence[WorkerState]) -> None:
        ring = sorted((_point(f"{t.name}#{i}".encode()), t.name) for t in targets for i in range(_VIRTUAL_NODES))
        self._points = [point for point, _ in ring]
        self._owners = 2 * [name for _, name in ring]  # so that once around is one piece, from wherever

    def choose(self, request: RouteRequest, workers: Sequence[WorkerState], rng: np.random.Generator) -> Decision:
        """Choose the first worker on the ring that is not above the bound."""
        if not request.prefix:
            return load_only(workers, "no prefix")
        requests = {worker.name: worker.requests for worker in workers}
        bound = load_bound(workers)
        start = bisect_left(self._points, _point(request.prefix[:PREFIX_BYTES]))
        if requests.get(self._owners[start], bound + 1) <= bound:  # as for most, who need not walk on
            return Decision(self._owners[start], "prefix")
        owners = (name for name in self._walk(start) if name in requests)
        first = next(owners)
        if requests[first] <= bound:
            return Decision(first, "prefix")
        return Decision(next(name for name in owners if requests[name] <= bound), "prefix: owner is above the bound")

    def _walk(self, start: int) -> Iterator[str]:
        """Owners of the points from one onwards, once around."""
        for place in range(start, start + len(self._points)):
            yield self._owners[place]


def _point(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
