"""What gateways of one cluster know of each other, some time after it happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from coterie.core import ModelGeometry
from coterie.counting import Row, Sums
from coterie.routing import Load
from coterie.sim.kernel import Kernel, Priority


class Exchange:
    """Tells each gateway what the others hold of the workers of one role.

    Args:
        kernel: runs it.
        gateways: how many.
        delay_s: from a change until the others know.
    """

    def __init__(self, kernel: Kernel, gateways: int, delay_s: float) -> None:
        self._kernel = kernel
        self._delay_s = delay_s
        self.loads = [LoadView(self, i) for i in range(gateways)]
        self._batches: list[BatchView] = []

    def batches(self, groups: Sequence[str], geometry: ModelGeometry) -> BatchView:
        """What the others' requests use, for one more gateway; see `Share`."""
        view = BatchView(self, len(groups), geometry.layers * geometry.experts)
        for other in self._batches:  # what is in flight there already
            view.sums += other.own
            view.requests += other.own_requests
        self._batches.append(view)
        return view

    def tell(self, hear: Callable[..., None], *what: object) -> None:
        """Let a view hear something in time."""
        if self._delay_s:
            self._kernel.after(self._delay_s, Priority.CHANGE, hear, *what)
        else:
            hear(*what)

    def other_batches(self, view: BatchView) -> Iterator[BatchView]:
        """All views but this."""
        return (other for other in self._batches if other is not view)


class LoadView:
    """What one gateway knows of the others' load; see `Others`.  It remembers no conversation of theirs."""

    def __init__(self, exchange: Exchange, me: int) -> None:
        self._exchange = exchange
        self._me = me
        self._heard: dict[tuple[int, int], Load] = {}
        self._news: set[int] = set()

    def attach(self, names: Sequence[str]) -> None:
        """See `Others.attach`; simulated workers stay the same."""

    def changed(self) -> Iterator[tuple[int, Load]]:
        """See `Others.changed`."""
        for position in sorted(self._news):
            loads = [load for (_, at), load in self._heard.items() if at == position]
            yield (
                position,
                Load(
                    sum(load.requests for load in loads),
                    sum(load.tokens for load in loads),
                    max(load.assigned for load in loads),
                ),
            )
        self._news.clear()

    def show(self, position: int, own: Load) -> None:
        """See `Others.show`."""
        for other in self._exchange.loads:
            if other is not self:
                self._exchange.tell(other.hear, self._me, position, own)

    def hear(self, gateway: int, position: int, load: Load) -> None:
        """Another gateway holds as much."""
        self._heard[gateway, position] = load
        self._news.add(position)

    def remember(self, session: str, worker: str) -> None:
        """See `Others.remember`."""

    def recall(self, session: str) -> str | None:
        """See `Others.recall`."""
        return None


class BatchView:
    """What one gateway knows of the others' batches; see `OtherBatches`.

    Attributes:
        own: `[G, L * E]`, sums of the rows of its own requests.
        own_requests: `[G]`, how many those are.
        sums: what it heard of others since the last `changed`, likewise.
        requests: how many those are.
    """

    def __init__(self, exchange: Exchange, groups: int, pairs: int) -> None:
        self._exchange = exchange
        self.own: Sums = np.zeros((groups, pairs), np.int64)
        self.own_requests = np.zeros(groups, np.int64)
        self.sums = np.zeros_like(self.own)
        self.requests = np.zeros_like(self.own_requests)

    def show(self, group: int, row: Row, sign: int) -> None:
        """See `OtherBatches.show`."""
        self.own[group] += sign * row
        self.own_requests[group] += sign
        for other in self._exchange.other_batches(self):
            self._exchange.tell(other.hear, group, row, sign)

    def hear(self, group: int, row: Row, sign: int) -> None:
        """A request of another gateway joined or left."""
        self.sums[group] += sign * row
        self.requests[group] += sign

    def changed(self) -> Iterator[tuple[int, int, Sums]]:
        """See `OtherBatches.changed`."""
        for group in np.flatnonzero((self.requests != 0) | self.sums.any(axis=1)).tolist():
            yield group, int(self.requests[group]), self.sums[group].copy()
        self.sums[:] = 0
        self.requests[:] = 0
