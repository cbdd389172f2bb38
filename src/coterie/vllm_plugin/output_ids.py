"""Scheduler side: the expert ids of single output tokens, for requests that ask for them.

In each step the worker copies the ids of the tokens noted here to one of the two pages of `slots`, in turn.
A page is read before it is given out again, or when a request ends.  By then the step that wrote it is
done: vLLM plans a step while at most one other is in flight.

    step       n-1      n       n+1
    page        0       1        0
    at the plan of n+1:  n may be in flight, n-1 is done: page 0 is read, then given to n+1

A token that is forwarded again, after a preemption, takes the place of what was read before, as it does in
the row of its block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from coterie.vllm_plugin.slots import PAGES, Slots
from coterie.wire import Ids

TokenIds = dict[int, Ids]
"""`[L, top_k]` ids of each token of a request that was read, by its position in prompt and output."""


@dataclass(frozen=True, slots=True)
class IdsJob:
    """Write the ids of the tokens at `kv_slots`, in this order, to a page under a ticket."""

    page: int
    ticket: int
    kv_slots: list[int]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tokens of a request: positions from `start` on, in a page's rows from `row` on."""

    owner: TokenIds
    start: int
    tokens: int
    row: int


@dataclass(frozen=True, slots=True)
class _Page:
    """What a step writes to a page."""

    ticket: int = 0
    runs: tuple[_Run, ...] = ()


class OutputIds:
    """The ids of the requests that asked; each request holds its own `TokenIds`.

    Args:
        slots: shared memory.
        block_size: tokens per block of the KV group that indexes the counts.
    """

    def __init__(self, slots: Slots, block_size: int) -> None:
        self._slots = slots
        self._block_size = block_size
        self._tickets = itertools.count(1)
        self._pages = [_Page() for _ in range(PAGES)]
        self._runs: list[_Run] = []
        self._kv_slots: list[int] = []

    def note(self, owner: TokenIds, start: int, end: int, table: Sequence[int]) -> None:
        """The step being planned forwards positions `start` to `end` of a request with this block table."""
        self._runs.append(_Run(owner, start, end - start, len(self._kv_slots)))
        size = self._block_size
        self._kv_slots.extend(table[position // size] * size + position % size for position in range(start, end))

    def job(self) -> IdsJob | None:
        """What the worker does in the step being planned, and nothing is noted any more."""
        if not self._runs:
            return None
        ticket = next(self._tickets)
        number = ticket % PAGES
        self._read(number, self._pages[number].runs)
        self._pages[number] = _Page(ticket, tuple(self._runs))
        job = IdsJob(number, ticket, self._kv_slots)
        self._runs, self._kv_slots = [], []
        return job

    def take(self, owner: TokenIds, start: int, end: int) -> list[Ids]:
        """Ids `[L, top_k]` of the positions `start` to `end` of a request that ended after `end` forwarded tokens.

        A step still in flight, which the worker did not write yet, can only forward later tokens.  What was never
        written is missing from the list.
        """
        for number in sorted(range(PAGES), key=lambda number: self._pages[number].ticket):
            self._read(number, [run for run in self._pages[number].runs if run.owner is owner])
        return [owner[position] for position in range(start, end) if position in owner]

    def _read(self, number: int, runs: Sequence[_Run]) -> None:
        """Hand the rows of a page to their requests; rows that the worker did not write are not handed out."""
        for run in runs:
            ids = self._slots.read_ids(number, self._pages[number].ticket, run.row, run.tokens)
            if ids is not None:
                run.owner.update(zip(range(run.start, run.start + run.tokens), ids, strict=True))
