"""A layer's pairs of token and expert, divided among servers, and the sums put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.experts.client.standing import Servers
from coterie.experts.client.table import Owners, Server

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Pairs that one server is to sum up.

    Attributes:
        key: its first pair, counted over `[T, K]`.  Parts are added in this order, whoever computed them and when.
        rows: `[n]` tokens that have pairs in it, in ascending order; None for all.
        ids: `[n, K]` experts of these tokens; -1 in the place of pairs that are not in it.
        pairs: how many there are.
        failed: whether some server failed it.
    """

    key: int
    rows: npt.NDArray[np.intp] | None
    ids: Ids
    pairs: int
    failed: bool = False

    @property
    def tokens(self) -> slice | npt.NDArray[np.intp]:
        """Index of its tokens, for arrays of all."""
        return slice(None) if self.rows is None else self.rows


def whole(ids: Ids) -> Part:
    """All pairs of `ids [T, K]`."""
    return _part(None, ids, ids.size)


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
    counts = count(part)
    usable = {expert: servers.usable(owners[expert], epoch) for expert in counts}
    if part.failed and (common := set.intersection(*map(set, usable.values()))):
        return dict.fromkeys(counts, min(common, key=servers.load))
    given: dict[Server, int] = {}

    def load(server: Server) -> tuple[int, int]:
        in_flight, turn = servers.load(server)
        return in_flight + given.get(server, 0), turn

    chosen = {}
    for expert in sorted(counts, key=lambda expert: (len(usable[expert]) > 1, -counts[expert], expert)):
        if usable[expert]:
            server = chosen[expert] = min(usable[expert], key=load)
            given[server] = given.get(server, 0) + counts[expert]
    return chosen


def count(part: Part) -> dict[int, int]:
    """Tokens of each expert in a part."""
    counts = np.bincount(part.ids.ravel() + 1)  # the first one counts what is not in the part
    experts = np.flatnonzero(counts[1:])
    return dict(zip(experts.tolist(), counts[experts + 1].tolist(), strict=True))


def split(part: Part, chosen: Mapping[int, Server]) -> list[tuple[Part, Server | None]]:
    """Divide a part by server; pairs of experts without one, if there are any, make a part for None."""
    experts = count(part)
    targets = list(dict.fromkeys(chosen.get(expert) for expert in experts))
    if len(targets) == 1:
        return [(part, targets[0])]
    place = np.full(max(experts) + 2, -1)  # the last one is where -1 points
    for expert in experts:
        place[expert] = targets.index(chosen.get(expert))
    at = place[part.ids]
    return [(_piece(part, at == number), target) for number, target in enumerate(targets)]


def _piece(part: Part, mine: npt.NDArray[np.bool_]) -> Part:
    rows = np.flatnonzero(mine.any(axis=1))
    ids = np.where(mine[rows], part.ids[rows], np.int32(-1))
    return _part(rows if part.rows is None else part.rows[rows], ids, int(mine.sum()))


def _part(rows: npt.NDArray[np.intp] | None, ids: Ids, pairs: int) -> Part:
    top_k = ids.shape[1]
    first = 0 if rows is None else int(rows[0])
    return Part(first * top_k + int((ids[0] >= 0).argmax()), rows, ids, pairs)


def total(tokens: int, sums: Iterable[tuple[Part, Floats]]) -> Floats:
    """Add the parts' sums, each once, in the order of their keys.

    Args:
        tokens: T.
        sums: `[n, H]` of each part; each pair of token and expert is in one.

    Returns:
        `[T, H]` float32.
    """
    first, *others = sorted(sums, key=lambda item: item[0].key)
    if not others and first[0].rows is None:
        return first[1]
    result = np.zeros((tokens, first[1].shape[1]), np.float32)
    for part, values in (first, *others):
        result[part.tokens] += values
    return result
