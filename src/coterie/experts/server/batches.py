"""Requests that are ready together, as few batches: those of one layer, top-k and dtype are computed at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.experts.protocol import Dtype, Request, from_float32, to_float32
from coterie.modeling.tiles import Floats

MOST_TOKENS = 2048
"""Of merged requests: enough to read weights once for many tokens, and a bound on the kernel's memory."""


class Batch(msgspec.Struct, frozen=True, eq=False):
    """Requests that are computed at once.

    Attributes:
        layer: of all of them.
        dtype: of all of them.
        members: their numbers, in the order of their tokens.
        tokens: of each of them.
        hidden: `[T, H]` float32.
        ids: `[T, K]`.
        router: `[T, K]`.
    """

    layer: int
    dtype: Dtype
    members: tuple[int, ...]
    tokens: tuple[int, ...]
    hidden: Floats
    ids: npt.NDArray[np.int32]
    router: Floats

    def split(self, sums: Floats) -> list[npt.NDArray[Any]]:
        """Each member's part of `sums [T, H]`, in the batch's dtype."""
        narrow = from_float32(sums, self.dtype)
        if len(self.tokens) == 1:
            return [narrow]
        return np.split(narrow, np.cumsum(self.tokens[:-1]))


def merge(requests: Iterable[tuple[int, Request]], most: int = MOST_TOKENS) -> list[Batch]:
    """Batches of numbered requests, in the order of their first members.

    Args:
        requests: that are ready.
        most: tokens of a batch; a request that has more is alone.
    """
    open_groups: dict[tuple[int, ...], list[tuple[int, Request]]] = {}
    groups: list[list[tuple[int, Request]]] = []
    for number, request in requests:
        key = (request.layer, *request.ids.shape[1:], *request.hidden.shape[1:], request.dtype)
        group = open_groups.get(key)
        if group is None or _tokens(group) + len(request.ids) > most:
            group = open_groups[key] = []
            groups.append(group)
        group.append((number, request))
    return [_join(group) for group in groups]


def _tokens(group: list[tuple[int, Request]]) -> int:
    return sum(len(request.ids) for _, request in group)


def _join(group: list[tuple[int, Request]]) -> Batch:
    members, requests = zip(*group, strict=True)
    first: Request = requests[0]
    hidden, ids, router = first.hidden, first.ids, first.weights
    if len(requests) > 1:
        hidden = np.concatenate([request.hidden for request in requests])
        ids = np.concatenate([request.ids for request in requests])
        router = np.concatenate([request.weights for request in requests])
    tokens = tuple([len(request.ids) for request in requests])
    return Batch(first.layer, first.dtype, members, tokens, to_float32(hidden, first.dtype), ids, router)
