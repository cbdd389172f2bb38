"""How many experts a changing batch activates at each decode step, without looking at each request anew."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.analysis.active import DecodeUse, count_experts, expert_sets
from coterie.core import ModelGeometry
from coterie.errors import InputError

_UNIT = 2.0**-24
_MOST = 1 - 2.0**-20
_ROOM = 64


class Batch(Protocol):
    """The requests that one worker decodes together.

    Requests are positions in the population; each place in the batch has a key of its own, since one request may
    be in it twice.
    """

    def __len__(self) -> int:
        """Requests in the batch."""
        ...

    def join(self, key: Hashable, request: int, taken: int = 0) -> None:
        """A request begins to decode, or goes on after `taken` steps."""
        ...

    def leave(self, key: Hashable) -> None:
        """A request has had its last step."""
        ...

    def step(self) -> float:
        """Take a step: the (layer, expert) pairs that it activates; the batch is not empty."""
        ...

    def used(self) -> npt.NDArray[np.floating[Any]]:
        """`[L, E]`: how likely each expert was to be active in the last step."""
        ...


class Experts(Protocol):
    """Which experts the requests of a population use when they decode."""

    @property
    def geometry(self) -> ModelGeometry:
        """The model's routed part."""
        ...

    def __len__(self) -> int:
        """Requests of the population."""
        ...

    def batch(self) -> Batch:
        """An empty batch."""
        ...


def experts_of(trace: ActivationTrace) -> Experts:
    """Experts of recorded requests: replayed where the trace has the ids of output tokens, else expected.

    Raises:
        InputError: a request has no counted output token.
    """
    if (trace.decode_covered < 1).any():
        raise InputError(
            f"simulation: request {int(trace.decode_covered.argmin())} of the trace has no counted output token; "
            "collect it with --max-tokens 2 or more"
        )
    if trace.decode_ids is not None:
        return ReplayedExperts(DecodeUse(trace.decode, trace.decode_covered, trace.decode_ids), trace.geometry)
    return ExpectedExperts(trace.decode / trace.decode_covered[:, None, None].astype(np.float32), trace.geometry)


# --- replayed ------------------------------------------------------------------------------------------------


class ReplayedExperts:
    """Recorded token by token: at its t-th step a request uses the experts of its output token t mod recorded tokens.

    So a request that decodes for longer than was recorded starts over.  The recorded tokens of a request with T output
    tokens are the T - 1 that were forwarded; the step that yields its first token forwards the prompt's last one, which
    is not recorded, and one of the request's own stands in for it.

    Args:
        use: outputs with their ids.
        geometry: the model's routed part.

    Raises:
        InputError: there are no ids.
    """

    def __init__(self, use: DecodeUse, geometry: ModelGeometry) -> None:
        if use.ids is None:
            raise InputError("simulation: no ids of output tokens to replay; take `ExpectedExperts`")
        self.geometry = geometry
        self._lengths = use.tokens
        self._starts = np.cumsum(use.tokens) - use.tokens
        self._sets = _as_words(expert_sets(use.ids, geometry.experts))

    def __len__(self) -> int:
        return len(self._lengths)

    def batch(self) -> Batch:
        """An empty batch."""
        return _ReplayedBatch(self._sets, self._starts, self._lengths, self.geometry)


class _ReplayedBatch:
    """Union of bit sets, one row for each token; the batch is three columns: first row, rows, steps taken."""

    def __init__(
        self,
        sets: npt.NDArray[np.uint64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        geometry: ModelGeometry,
    ) -> None:
        self._sets, self._starts, self._lengths, self._geometry = sets, starts, lengths, geometry
        self._union = np.zeros_like(sets[0])
        self._columns = np.empty((3, _ROOM), dtype=np.int64)
        self._place: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []

    def __len__(self) -> int:
        return len(self._keys)

    def join(self, key: Hashable, request: int, taken: int = 0) -> None:
        place = len(self._keys)
        if place == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._columns[:, place] = self._starts[request], self._lengths[request], taken
        self._place[key] = place
        self._keys.append(key)

    def leave(self, key: Hashable) -> None:
        """The last one takes the place that becomes free."""
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._columns[:, place] = self._columns[:, len(self._keys)]
            self._keys[place] = last
            self._place[last] = place

    def step(self) -> float:
        starts, lengths, taken = self._columns[:, : len(self._keys)]
        self._union = np.bitwise_or.reduce(self._sets[starts + taken % lengths], axis=0)
        taken += 1
        return float(count_experts(self._union))

    def used(self) -> npt.NDArray[np.floating[Any]]:
        layers, experts = self._geometry.layers, self._geometry.experts
        each = -(-experts // 8)
        sets = self._union.view(np.uint8)[: layers * each].reshape(layers, each)
        return np.unpackbits(sets, axis=1, count=experts, bitorder="little").astype(np.float32)


def _as_words(sets: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """`[tokens, L, bytes]` to `[tokens, words]`, padded with zeros: eight bytes are united at once."""
    flat = sets.reshape(len(sets), -1)
    padded = np.zeros((len(flat), -(-flat.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : flat.shape[1]] = flat
    return padded.view(np.uint64)


# --- expected ------------------------------------------------------------------------------------------------


class ExpectedExperts:
    """Each request uses each expert with a probability of its own, independently of the others at each step.

        active = sum over (l, e) of 1 - product over requests i of (1 - p[i, l, e])

    This is the mean of the union over all combinations of the requests' tokens, as in `DecodeUse.active`.  The
    product is kept as a sum of logarithms, in whole multiples of 2^-24: whole numbers add without rounding, so a
    request that leaves takes away exactly what it brought, and the sum does not depend on who came first.  The price
    is a relative error of at most 2^-25 per request in each product.  Probabilities above 1 - 2^-20 are taken for that.

    Args:
        probabilities: `[N, L, E]`.
        geometry: the model's routed part.

    Raises:
        InputError: a probability is not from 0 to 1, or the shape is not the geometry's.
    """

    def __init__(self, probabilities: npt.NDArray[np.floating[Any]], geometry: ModelGeometry) -> None:
        if probabilities.ndim != 3 or probabilities.shape[1:] != (geometry.layers, geometry.experts):
            raise InputError(f"simulation: probabilities {probabilities.shape} are not (N, L, E) of {geometry}")
        if not (probabilities.min(initial=0) >= 0 and probabilities.max(initial=0) <= 1):
            raise InputError("simulation: a probability of an expert is not from 0 to 1")
        self.geometry = geometry
        self._idle = np.empty((len(probabilities), geometry.layers * geometry.experts), dtype=np.int32)
        for row, one in zip(self._idle, probabilities, strict=True):
            row[:] = np.rint(np.log1p(-np.minimum(one.ravel(), _MOST, dtype=np.float64)) / _UNIT)

    def __len__(self) -> int:
        return len(self._idle)

    def batch(self) -> Batch:
        """An empty batch."""
        return _ExpectedBatch(self._idle, self.geometry)


class _ExpectedBatch:
    """Sum of the logarithms of each expert's being idle; summed up anew only when the batch has changed."""

    def __init__(self, idle: npt.NDArray[np.int32], geometry: ModelGeometry) -> None:
        self._idle, self._geometry = idle, geometry
        self._sum = np.zeros(idle.shape[1], dtype=np.int64)
        self._request: dict[Hashable, int] = {}
        self._active: float | None = None

    def __len__(self) -> int:
        return len(self._request)

    def join(self, key: Hashable, request: int, taken: int = 0) -> None:
        self._request[key] = request
        self._sum += self._idle[request]
        self._active = None

    def leave(self, key: Hashable) -> None:
        self._sum -= self._idle[self._request.pop(key)]
        self._active = None

    def step(self) -> float:
        if self._active is None:
            self._active = len(self._sum) - float(np.exp(self._sum * _UNIT).sum())
        return self._active

    def used(self) -> npt.NDArray[np.floating[Any]]:
        used: npt.NDArray[np.float64] = 1 - np.exp(self._sum * _UNIT)
        return used.reshape(self._geometry.layers, self._geometry.experts)
