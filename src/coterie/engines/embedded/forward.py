"""Runs a planned step through the model, and counts which experts it used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coterie.blockrows import HostRows
from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.embedded.sampling import Floats
from coterie.engines.embedded.scheduler import Step, Work
from coterie.errors import EngineError
from coterie.modeling import PartError, StepBatch, StepOutput
from coterie.wire import Ids, smallest_dtype


class StepModel(Protocol):
    """What the engine needs of `modeling.Model`."""

    @property
    def geometry(self) -> ModelGeometry:
        """The routed part."""
        ...

    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary."""
        ...

    def forward(self, batch: StepBatch, kv: Floats) -> StepOutput:
        """Compute a step; see `modeling.Model.forward`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A step's results.

    Attributes:
        logits: `[R, V]` of the work that samples, in the order of the step.
        ids: of each work, `[length, L, top_k]`.
    """

    logits: Floats
    ids: tuple[Ids, ...]


class StepError(EngineError):
    """Some of a step cannot be computed now.

    Attributes:
        work: what of it; the rest was not computed either, but can be.
    """

    def __init__(self, message: str, work: tuple[Work, ...]) -> None:
        super().__init__(message)
        self.work = work


class Runner:
    """The model, its cache, and the counts of each block.

    A block's counts start from zero when it is given out and grow with each token forwarded into it.  So they hold
    whatever is found in the cache, evicted, preempted or loaded: a loaded token counts nothing.

    Args:
        model: the model.
        kv: its cache, `[blocks, ...]`.
        block_size: tokens of a block.
    """

    def __init__(self, model: StepModel, kv: Floats, block_size: int) -> None:
        geometry = model.geometry
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._geometry = geometry
        self._rows = HostRows(len(kv), block_size, geometry)
        self._layer_base = (np.arange(geometry.layers) * geometry.experts)[:, None]
        self._used = np.zeros((geometry.layers, geometry.experts), np.bool_)
        self.active_experts: npt.NDArray[np.int64] = np.zeros(geometry.layers, np.int64)

    def restart(self, blocks: Sequence[int]) -> None:
        """Blocks were given out: what they counted is forgotten."""
        if blocks:
            self._rows.restart(list(blocks))

    def run(self, step: Step) -> Computed:
        """Compute a step that has work.

        Raises:
            StepError: what computes the model's experts elsewhere is not there.
        """
        batch, slots = self._batch(step.work)
        try:
            output = self._model.forward(batch, self._kv)
        except PartError as error:
            raise StepError(str(error), _work_at(error.tokens, step, batch)) from error
        self._rows.add(slots, output.expert_ids)
        self._count_active(output.expert_ids)
        ids = tuple(output.expert_ids[start : start + length] for start, length in batch.rows)
        return Computed(output.logits, ids)

    def counts(self, blocks: Sequence[int], tokens: int) -> ExpertCounts:
        """Experts of a text of so many tokens, which has these blocks to itself as far as they are not full."""
        covered, counts = self._rows.sum(list(blocks))
        small = counts.astype(smallest_dtype(int(counts.max(initial=0))))
        return ExpertCounts(self._geometry, small, tokens, covered)

    def _batch(self, works: Sequence[Work]) -> tuple[StepBatch, npt.NDArray[np.intp]]:
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows, tables, wanted = [], [], []
        for work in works:
            end, blocks = work.start + work.length, work.request.blocks
            rows.append((len(tokens), work.length))
            tables.append(blocks)
            tokens += work.request.tokens[work.start : end]
            positions += range(work.start, end)
            slots += [blocks[position // size] * size for position in range(work.start, end)]
            if work.samples:
                wanted.append(len(tokens) - 1)
        batch = StepBatch(np.array(tokens), np.array(positions), rows, tables, np.array(wanted, np.intp))
        return batch, np.array(slots)

    def _count_active(self, ids: Ids) -> None:
        self._used[:] = False
        self._used.reshape(-1)[ids + self._layer_base] = True
        self.active_experts += self._used.sum(axis=1)


def _work_at(tokens: Sequence[slice], step: Step, batch: StepBatch) -> tuple[Work, ...]:
    """The work that has some of these tokens."""
    spans = zip(step.work, batch.rows, strict=True)
    return tuple(
        work
        for work, (start, length) in spans
        if any(start < part.stop and part.start < start + length for part in tokens)
    )
