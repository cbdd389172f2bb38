"""Scheduler side: which block rows restart, which requests are summed, and their envelopes.

A block's row is valid for a token range of a request only if every token in it was forwarded here
since the block was last given out.  Two rules keep that true:

1. *Admission.*  When a waiting request gets its blocks, all blocks beyond its local prefix hit restart,
   so a block that is then filled from outside (remote prefill, offloading, a copied partial block)
   counts nothing instead of its previous owner's tokens.
2. *First write.*  A block whose first token is forwarded in this step restarts, so blocks that a
   running request grows into, or that are recomputed after a failed load, start from zero.

Rows of hits are left as they are: their tokens were counted when they were forwarded.  Nothing here
depends on eviction, preemption or reuse being seen.

    prompt  |---- hit: kept ----|---- new: restarts at admission ----|
    blocks  [  0  ][  1  ][  2  ][  3  ][  4  ][  5  ]
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.core import ExpertCounts, ModelGeometry
from coterie.errors import InputError
from coterie.vllm_plugin.output_ids import IdsJob, OutputIds, TokenIds
from coterie.vllm_plugin.slots import PARTS, PROMPT_PART, Layout, Slots
from coterie.wire import (
    ASK_COUNTS,
    ASK_IDS,
    OUTPUT_IDS_KEY,
    OUTPUT_KEY,
    PROMPT_KEY,
    Ids,
    check_ids,
    count_ids,
    encode_counts,
    encode_ids,
    smallest_dtype,
)

log = logging.getLogger("vllm.coterie")


@dataclass(frozen=True, slots=True)
class SumJob:
    """Sum the rows of `blocks` and write the result to a slot under a ticket."""

    slot: int
    part: int
    ticket: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the worker does in one step: restart rows before the forward, sum and copy ids after it."""

    restart: list[int]
    jobs: list[SumJob]
    ids: IdsJob | None
    slots_path: str


@dataclass(slots=True)
class _Tracked:
    """A request whose counts go back to the client.

    `totals` maps the number of forwarded tokens to the (part, ticket) of the sum made at that step, for the
    last two steps; `sums` counts them.  `readmitted` says that the request lost its blocks after its prompt
    was summed, so that its blocks may cover other tokens of the prompt than that sum.  `ids` is None where
    the ids of the output were not asked for.
    """

    prompt_tokens: int
    wants_output: bool
    ids: TokenIds | None = None
    slot: int | None = None
    prompt_ticket: int | None = None
    totals: dict[int, tuple[int, int]] = field(default_factory=dict)
    sums: int = 0
    readmitted: bool = False

    def next_part(self, end: int, ticket: int) -> int:
        """Part for the whole request's sum over `end` tokens; the sum of the step before keeps its own."""
        part = 1 + self.sums % (PARTS - 1)
        self.sums += 1
        self.totals = {tokens: total for tokens, total in self.totals.items() if total[0] != part}
        self.totals[end] = (part, ticket)
        return part


class CountsPlan:
    """The scheduler's side of the counts connector.  No method raises on a client's content.

    Args:
        layout: sizes of the shared memory; layers are an upper bound until the worker announced the MoE layers.
        block_size: tokens per block of the full-attention KV group.
    """

    def __init__(self, layout: Layout, block_size: int) -> None:
        self._geometry = layout.geometry
        self._block_size = block_size
        self._slots, self._path = Slots.create(layout)
        self._free = list(range(layout.slots - 1, -1, -1))
        self._ids = OutputIds(self._slots, block_size)
        self._tickets = itertools.count(1)
        self._tracked: dict[str, _Tracked] = {}
        self._local_blocks: dict[str, int] = {}
        self._restart: list[int] = []
        self._dropped = 0
        self._dropped_taken = 0

    # --- what the scheduler tells -------------------------------------------------------------------

    def request_added(self, request_id: str, prompt_tokens: int, params: object) -> None:
        """A request entered the engine; remember it if its counts are wanted."""
        if not isinstance(params, Mapping):
            return
        asked = params.get(PROMPT_KEY)
        wants_output = asked in (ASK_COUNTS, ASK_IDS)
        if wants_output or params.get("do_remote_decode"):
            self._tracked[request_id] = _Tracked(prompt_tokens, wants_output, {} if asked == ASK_IDS else None)

    def prefix_looked_up(self, request_id: str, local_tokens: int) -> None:
        """A waiting request hits `local_tokens` tokens of this engine's own prefix cache."""
        self._local_blocks[request_id] = local_tokens // self._block_size

    def blocks_given(self, request_id: str, blocks: Sequence[int]) -> None:
        """A waiting request got its blocks (again after a load from outside: then nothing is new)."""
        local = self._local_blocks.pop(request_id, None)
        if local is None:
            return
        self._restart.extend(blocks[local:])
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.prompt_ticket is not None:
            tracked.readmitted = True

    def step(self, scheduled: Mapping[str, tuple[int, int]], block_ids: Callable[[str], Sequence[int]]) -> StepPlan:
        """Plan one step.

        Args:
            scheduled: request id -> (tokens computed before the step, tokens of the step).
            block_ids: the block table of a scheduled request, in the full-attention group.
        """
        restart, self._restart = self._restart, []
        jobs: list[SumJob] = []
        for request_id, (start, tokens) in scheduled.items():
            first = -(-start // self._block_size)
            last = -(-(start + tokens) // self._block_size)
            tracked = self._tracked.get(request_id)
            sums = tracked is not None and self._sums_in_step(tracked, start + tokens)
            if first == last and not sums:
                continue
            table = block_ids(request_id)
            restart.extend(table[first:last])
            if tracked is not None and sums:
                jobs.extend(self._jobs(tracked, start + tokens, table))
                if tracked.ids is not None and start + tokens > tracked.prompt_tokens:
                    self._ids.note(tracked.ids, max(start, tracked.prompt_tokens), start + tokens, table)
        if self._slots.announced_layers:
            self._slots.unlink()
        return StepPlan(restart, jobs, self._ids.job(), str(self._path))

    @staticmethod
    def _sums_in_step(tracked: _Tracked, end: int) -> bool:
        if tracked.prompt_ticket is None:
            return end == tracked.prompt_tokens  # later, the blocks hold tokens of the output too
        return tracked.wants_output and end > tracked.prompt_tokens

    def _jobs(self, tracked: _Tracked, end: int, table: Sequence[int]) -> list[SumJob]:
        if tracked.slot is None:
            if not self._free:
                self._drop("no free slot")
                return []
            tracked.slot = self._free.pop()
        ticket = next(self._tickets)
        if tracked.prompt_ticket is None:
            tracked.prompt_ticket = ticket
            part = PROMPT_PART
        else:
            part = tracked.next_part(end, ticket)
        return [SumJob(tracked.slot, part, ticket, list(table[: -(-end // self._block_size)]))]

    # --- what the client gets -----------------------------------------------------------------------

    def request_finished(self, request_id: str, all_tokens: int) -> dict[str, Any] | None:
        """Envelopes of a finished request, or None; its slot is free again.

        Args:
            request_id: the engine's id of the request.
            all_tokens: prompt and output tokens; the last of them was sampled and not forwarded.
        """
        self._local_blocks.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None or tracked.slot is None:
            return None
        try:
            return self._envelopes(tracked, tracked.slot, all_tokens - 1)
        except InputError as error:  # a row was counted twice or not at all: say nothing rather than something wrong
            self._drop(str(error))
            return None
        finally:
            self._free.append(tracked.slot)
            if tracked.ids:
                tracked.ids.clear()  # a page refers to it until another step is written there

    def _envelopes(self, tracked: _Tracked, slot: int, forwarded: int) -> dict[str, Any] | None:
        prompt = None if tracked.prompt_ticket is None else self._slots.read(slot, PROMPT_PART, tracked.prompt_ticket)
        if prompt is None:
            self._drop("the worker did not write the sum")
            return None
        covered, counts = prompt
        envelopes: dict[str, Any] = {PROMPT_KEY: encode_counts(self._checked(counts, tracked.prompt_tokens, covered))}
        if tracked.wants_output:
            output = self._checked(*self._output(tracked, slot, forwarded, covered, counts))
            envelopes[OUTPUT_KEY] = encode_counts(output)
            if tracked.ids is not None:
                envelopes[OUTPUT_IDS_KEY] = self._output_ids(tracked, tracked.ids, output)
        return envelopes

    def _output(
        self, tracked: _Tracked, slot: int, forwarded: int, covered: int, prompt: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], int, int]:
        tokens = forwarded - tracked.prompt_tokens
        if tokens <= 0:
            return np.zeros_like(prompt), 0, 0
        part, ticket = tracked.totals.get(forwarded, (1, 0))
        total = self._slots.read(slot, part, ticket)
        if total is None:
            raise InputError(f"no sum over {forwarded} forwarded tokens")
        complete = covered == tracked.prompt_tokens and total[0] == forwarded
        if tracked.readmitted and not complete:  # the two sums may be over different tokens of the prompt
            return np.zeros_like(prompt), tokens, 0
        return total[1] - prompt, tokens, total[0] - covered

    def _checked(self, counts: npt.NDArray[np.int32], tokens: int, covered: int) -> ExpertCounts:
        if counts.min(initial=0) < 0:
            raise InputError("a sum went down")
        geometry = ModelGeometry(counts.shape[0], self._geometry.experts, self._geometry.top_k)
        return ExpertCounts(geometry, counts.astype(smallest_dtype(int(counts.max(initial=0)))), tokens, covered)

    def _output_ids(self, tracked: _Tracked, ids: TokenIds, output: ExpertCounts) -> dict[str, Any] | None:
        """The ids, if they are exactly what was counted; after a preemption, blocks of another request may count."""
        geometry, start = output.geometry, tracked.prompt_tokens
        rows = self._ids.take(ids, start, start + output.tokens)
        found = np.array(rows, smallest_dtype(geometry.experts - 1)).reshape(-1, geometry.layers, geometry.top_k)
        if output.complete and _add_up(found, output):
            return encode_ids(found, geometry.experts)
        self._drop("the ids of its output do not add up to its counts")
        return None

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:  # 1st, 2nd, 4th, 8th...: a lasting fault must not flood the log
            log.warning("coterie: counts or ids of a request are not returned (%d so far): %s", self._dropped, reason)

    def take_dropped(self) -> int:
        """Requests whose counts or ids could not be returned, since the last call."""
        dropped, self._dropped_taken = self._dropped - self._dropped_taken, self._dropped
        return dropped

    @property
    def live_slots(self) -> int:
        """Slots in use; 0 when no tracked request is in the engine."""
        return sum(tracked.slot is not None for tracked in self._tracked.values())

    def close(self) -> None:
        """Remove the shared file if the worker never mapped it."""
        self._slots.unlink()


def _add_up(ids: Ids, output: ExpertCounts) -> bool:
    try:
        check_ids(ids, output.geometry)
    except InputError:
        return False
    return np.array_equal(count_ids(ids, output.geometry.experts), output.counts)
