"""One layer's tokens: which of their parts wait for a server, which are at one, and which are summed up.

        unsent ──── sent ────▶ flying ──── summed ────▶ summed
           ▲                      │
           └─────── returned ─────┘   died, refused, or withdrawn

Each pair of token and expert is in exactly one part of one of the three, and a part that is summed stays so: nothing is
added twice or asked for again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy.typing as npt

from coterie.errors import InputError
from coterie.experts.client.links import Link, Pending
from coterie.experts.client.parts import Floats, Ids, Part, total, whole
from coterie.experts.client.table import Server
from coterie.experts.protocol import Dtype, Request, to_float32


class Flight(msgspec.Struct, frozen=True, eq=False):
    """A part that was sent.

    Attributes:
        part: what was sent.
        server: to whom.
        epoch: of the table by which it was chosen.
        waited_s: how long the client had waited for replies by then, in all.
        link: by which connection.
        pending: what waits for the reply.
    """

    part: Part
    server: Server
    epoch: int
    waited_s: float
    link: Link
    pending: Pending


class Call:
    """The state of one call.

    Args:
        layer: MoE layer.
        hidden: `[T, H]` hidden states.
        ids: `[T, K]` experts of each token.
        weights: `[T, K]` what each expert's output is multiplied by.
        dtype: of `hidden`.

    Attributes:
        unsent: parts that wait for a server.
        flying: parts that are at one.
        failures: by server's name, why it did not compute a part.
        problem: why nobody will compute it, if that was heard while another call was waited for.
    """

    def __init__(
        self, layer: int, hidden: npt.NDArray[Any], ids: Ids, weights: Floats, dtype: Dtype = Dtype.FLOAT32
    ) -> None:
        self.layer = layer
        self._hidden, self._weights, self._dtype = hidden, weights, dtype
        self.unsent = [whole(ids)]
        self.flying: list[Flight] = []
        self.failures: dict[str, str] = {}
        self.problem: InputError | None = None
        self._summed: list[tuple[Part, Floats]] = []

    @property
    def is_done(self) -> bool:
        """Whether all parts are summed."""
        return not self.unsent and not self.flying

    def request(self, part: Part, epoch: int, owner: int) -> Request:
        """What to send for a part."""
        tokens = part.tokens
        weights = self._weights[tokens]
        return Request(self.layer, epoch, owner, self._hidden[tokens], part.ids, weights, self._dtype)

    def shape(self, part: Part) -> tuple[int, int]:
        """Shape of the reply to a part."""
        return len(part.ids), self._hidden.shape[1]

    def summed(self, flight: Flight, sums: npt.NDArray[Any]) -> None:
        """The reply to a part came."""
        self.flying.remove(flight)
        self._summed.append((flight.part, to_float32(sums, self._dtype)))

    def returned(self, flight: Flight, why: str) -> None:
        """The reply to a part will not come."""
        self.flying.remove(flight)
        self.failures[flight.server.name] = why
        self.unsent.append(replace(flight.part, failed=True))

    def total(self) -> Floats:
        """`[T, H]` float32 sums of a call that is done."""
        return total(len(self._hidden), self._summed)
