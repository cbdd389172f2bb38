"""A layer's pairs of token and expert, divided among servers, and the sums put together again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from coterie.experts.client.standing import Servers
from coterie.experts.client.table import Owners, Server

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
_FEW = 256  # pairs that are counted faster one by one


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Pairs that one server is to sum up.

    Attributes:
        rows: `[n]` tokens that have pairs in it, in ascending order; None for all.
        ids: `[n, K]` experts of these tokens; -1 in the place of pairs that are not in it.
        counts: tokens of each expert in it.
        failed: whether some server failed it.
    """

    rows: npt.NDArray[np.intp] | None
    ids: Ids
    counts: Mapping[int, int]
    failed: bool = False

    @property
    def pairs(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    @property
    def tokens(self) -> slice | npt.NDArray[np.intp]:
        """Index of its tokens, for arrays of all."""
        return slice(None) if self.rows is None else self.rows

    @property
    def key(self) -> tuple[int, int]:
        """Its first pair, as token and place.  Parts are added in this order, whoever computed them and when."""
        return 0 if self.rows is None else int(self.rows[0]), int((self.ids[0] >= 0).argmax())


def whole(ids: Ids) -> Part:
    """All pairs of `ids [T, K]`."""
    if ids.size <= _FEW:
        return Part(None, ids, Counter(ids.ravel().tolist()))
    counts = np.bincount(ids.ravel())
    experts = np.flatnonzero(counts)
    return Part(None, ids, dict(zip(experts.tolist(), counts[experts].tolist(), strict=True)))


def choose(part: Part, owners: Sequence[Owners], servers: Servers, epoch: int) -> dict[int, Server]:
    """A server for each expert of a part: of those of the best standing, that with the fewest pairs in flight.

    Experts of one owner come first, then the others, those of most tokens first; ties go to the server that was asked
    longest ago.  A part that failed goes to one server as it is, if one has all of it: then its sum has the same bits.
    Experts that nobody can be asked for are left out.

    Args:
        part: what is to be sent.
        owners: `[E]` servers of the layer's experts.
        servers: what is thought of them.
        epoch: of the table that `owners` are from.
    """
    usable = {expert: servers.usable(owners[expert], epoch) for expert in part.counts}
    if part.failed and (common := set.intersection(*map(set, usable.values()))):
        return dict.fromkeys(usable, min(common, key=servers.load))
    chosen = {expert: some[0] for expert, some in usable.items() if len(some) == 1}
    if len(chosen) == len(usable):
        return chosen
    given: dict[Server, int] = {}
    for expert, server in chosen.items():
        given[server] = given.get(server, 0) + part.counts[expert]

    def load(server: Server) -> tuple[int, int]:
        in_flight, turn = servers.load(server)
        return in_flight + given.get(server, 0), turn

    shared = [expert for expert, some in usable.items() if len(some) > 1]
    for expert in sorted(shared, key=lambda expert: (-part.counts[expert], expert)):
        server = chosen[expert] = min(usable[expert], key=load)
        given[server] = given.get(server, 0) + part.counts[expert]
    return chosen


def split(part: Part, chosen: Mapping[int, Server]) -> list[tuple[Part, Server | None]]:
    """Divide a part by server; pairs of experts without one, if there are any, make a part for None."""
    groups: dict[Server | None, dict[int, int]] = {}
    for expert, tokens in part.counts.items():
        groups.setdefault(chosen.get(expert), {})[expert] = tokens
    if len(groups) == 1:
        return [(part, target) for target in groups]
    number_of = np.full(max(part.counts) + 2, -1)  # the last one is where -1 points
    for number, counts in enumerate(groups.values()):
        number_of[list(counts)] = number
    mine = number_of[part.ids] == np.arange(len(groups))[:, None, None]  # (groups, T, K)
    ids, present = np.where(mine, part.ids, np.int32(-1)), mine.any(axis=2)
    pieces = map(_piece, repeat(part), ids, present, groups.values())
    return list(zip(pieces, groups, strict=True))


def cut(part: Part, most: int) -> list[Part]:
    """Divide a part into some that have at most so many tokens, one at least."""
    return [_rows(part, slice(first, first + most)) for first in range(0, len(part.ids), most)]


def _rows(part: Part, which: slice) -> Part:
    ids, rows = part.ids[which], np.arange(len(part.ids)) if part.rows is None else part.rows
    return replace(part, rows=rows[which], ids=ids, counts=Counter(ids[ids >= 0].tolist()))


def _piece(part: Part, ids: Ids, present: npt.NDArray[np.bool_], counts: Mapping[int, int]) -> Part:
    """Of a part's tokens those that are present, with these `ids`."""
    if present.all():
        return Part(part.rows, ids, counts)
    rows = np.flatnonzero(present)
    return Part(rows if part.rows is None else part.rows[rows], ids[rows], counts)


def total(tokens: int, sums: Sequence[tuple[Part, Floats]]) -> Floats:
    """Add the parts' sums, each once, in the order of their keys.

    Args:
        tokens: T.
        sums: `[n, H]` of each part; each pair of token and expert is in one.

    Returns:
        `[T, H]` float32.
    """
    if len(sums) == 1:
        return sums[0][1]
    result = np.zeros((tokens, sums[0][1].shape[1]), np.float32)
    for part, values in sorted(sums, key=lambda item: item[0].key):
        result[part.tokens] += values
    return result
