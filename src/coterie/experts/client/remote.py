"""Experts that are computed elsewhere, as one function of a layer's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.clock import Clock, SystemClock
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.experts.client.call import Call
from coterie.experts.client.exchange import Exchange, Patience
from coterie.experts.client.links import Connect, Links
from coterie.experts.client.parts import Floats, Ids
from coterie.experts.client.table import Directory
from coterie.experts.protocol import Dtype, least_and_most


class Started:
    """A call whose first requests are sent; see `RemoteExperts.start`."""

    def __init__(self, exchange: Exchange, calls: Sequence[Call], hidden: int) -> None:
        self._exchange, self._calls, self._hidden = exchange, calls, hidden

    def finish(self, deadline_s: float) -> Floats:
        """Wait for the rest; `[T, H]` float32.

        Raises:
            EngineError: some expert's servers did not reply by the deadline.
        """
        sums = [self._exchange.finish(call, deadline_s) for call in self._calls]
        if len(sums) == 1:
            return sums[0]
        return np.concatenate(sums) if sums else np.zeros((0, self._hidden), np.float32)

    def cancel(self) -> None:
        """Want no sums any more."""
        for call in self._calls:
            self._exchange.cancel(call)


class RemoteExperts:
    """A model's experts, in servers.  For one thread.

    The tokens of a layer are divided by server, and all servers are asked at once.  What a server fails goes to
    another one that holds the same experts; nothing else is asked for again, and each reply is added once.  Sums of
    several servers are added in float32, in an order that does not depend on when they came.

    Args:
        geometry: of the model.
        hidden: size of its hidden states.
        directory: says who holds what.
        connect: makes connections.
        patience: how long to wait before others are asked.
        clock: by which deadlines are meant; connections go by `time.monotonic`.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        hidden: int,
        directory: Directory,
        connect: Connect,
        *,
        patience: Patience | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._geometry, self._hidden, self._directory = geometry, hidden, directory
        self._exchange = Exchange(
            directory, Links(connect), hidden, patience or Patience(), SystemClock() if clock is None else clock
        )

    def connect(self, deadline_s: float) -> None:
        """Connect to all servers before there is something to compute; those that do not reply by then are doubted."""
        self._exchange.connect(deadline_s)

    def compute(
        self,
        layer: int,
        hidden: npt.NDArray[Any],
        ids: npt.NDArray[np.integer[Any]],
        weights: Floats,
        deadline_s: float,
        dtype: Dtype = Dtype.FLOAT32,
    ) -> Floats:
        """The weighted sum of what each token's experts make of it.

        Args:
            layer: MoE layer, from 0.
            hidden: `[T, H]` hidden states.
            ids: `[T, K]` experts of each token.
            weights: `[T, K]` float32, what each expert's output is multiplied by.
            deadline_s: when to give up, by the clock.
            dtype: of `hidden`, and of what servers reply.

        Returns:
            `[T, H]` float32.

        Raises:
            InputError: the arrays do not fit each other, or there is no such layer or expert.
            EngineError: some expert's servers did not reply by the deadline.
        """
        return self.start(layer, hidden, ids, weights, dtype).finish(deadline_s)

    def start(
        self,
        layer: int,
        hidden: npt.NDArray[Any],
        ids: npt.NDArray[np.integer[Any]],
        weights: Floats,
        dtype: Dtype = Dtype.FLOAT32,
    ) -> Started:
        """Send what `compute` would, and do not wait: there is other work to do meanwhile.

        Several calls may be under way.  Each must be finished or cancelled, and its arrays stay as they are until then.

        Raises:
            InputError: as `compute`.
        """
        experts = self._checked(layer, hidden, ids, weights)
        most = self._directory.table().tokens
        calls = [
            Call(
                layer, hidden[first : first + most], experts[first : first + most], weights[first : first + most], dtype
            )
            for first in range(0, len(experts), most)
        ]
        if calls:
            self._exchange.start(calls[0])
        return Started(self._exchange, calls, self._hidden)

    def close(self) -> None:
        """Leave all connections to others."""
        self._exchange.close()

    def _checked(self, layer: int, hidden: npt.NDArray[Any], ids: npt.NDArray[np.integer[Any]], weights: Floats) -> Ids:
        """The ids as they are sent."""
        geometry = self._geometry
        if not 0 <= layer < geometry.layers:
            raise InputError(f"layer {layer} of {geometry.layers} MoE layers")
        if hidden.ndim != 2 or hidden.shape[1] != self._hidden or ids.ndim != 2 or len(ids) != len(hidden):
            raise InputError(f"hidden states {hidden.shape} and ids {ids.shape}; need [T, {self._hidden}] and [T, K]")
        if weights.shape != ids.shape:
            raise InputError(f"weights {weights.shape} for ids {ids.shape}")
        least, most = least_and_most(ids)
        if ids.size and not 0 <= least <= most < geometry.experts:
            raise InputError(f"layer {layer}: experts {least} to {most} of {geometry.experts}")
        return ids.astype(np.int32, copy=False)
