"""One step of an engine: which tokens of which requests are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.errors import InputError
from coterie.modeling.attention import Indices


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """Tokens computed in one step.

    Attributes:
        token_ids: `[T]` whole numbers.
        positions: `[T]` each token's position in its request; those of one request follow one another.
        rows: of each request, the place of its first token in the step and how many it has.
        block_tables: of each request, the cache blocks of its positions from 0 on.
        logits_rows: `[R]` tokens of the step whose logits are wanted.
    """

    token_ids: npt.NDArray[np.integer]
    positions: npt.NDArray[np.integer]
    rows: Sequence[tuple[int, int]]
    block_tables: Sequence[Sequence[int]]
    logits_rows: npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Where a step's tokens stand.

    Attributes:
        positions: `[T]`.
        blocks: `[T]` cache block in which each token's keys and values go.
        offsets: `[T]` place in it.
    """

    positions: Indices
    blocks: Indices
    offsets: Indices


def check_batch(batch: StepBatch, blocks: int, block_size: int, *, vocab: int, max_positions: int) -> None:
    """Check a step against the cache and the model.

    Raises:
        InputError: naming what is wrong with which request.
    """
    tokens = len(batch.token_ids)
    if not tokens:
        raise InputError("step: there are no tokens to compute")
    if len(batch.positions) != tokens or sum(length for _, length in batch.rows) != tokens:
        raise InputError(f"step: {tokens} tokens, {len(batch.positions)} positions, rows {list(batch.rows)[:8]}")
    if len(batch.rows) != len(batch.block_tables):
        raise InputError(f"step: {len(batch.rows)} requests, but {len(batch.block_tables)} block tables")
    _check_range("token id", batch.token_ids, vocab)
    _check_range("position", batch.positions, max_positions)
    _check_range("logits row", batch.logits_rows, tokens)
    end = 0
    for (start, length), table in zip(batch.rows, batch.block_tables, strict=True):
        own = batch.positions[start : start + length]
        if start != end or length < 1 or (length > 1 and (np.diff(own) != 1).any()):
            raise InputError(f"step: the request at row {start} has {length} tokens at positions {own[:8].tolist()}")
        if len(table) * block_size <= own[-1] or not 0 <= min(table) <= max(table) < blocks:
            raise InputError(
                f"step: the request at row {start} has {len(table)} blocks of {block_size} tokens, among {blocks}; "
                f"they do not hold position {int(own[-1])}"
            )
        end = start + length


def _check_range(name: str, values: npt.NDArray[np.integer], count: int) -> None:
    if values.size and not 0 <= values.min() <= values.max() < count:
        raise InputError(f"step: a {name} is not from 0 to {count - 1}: {values.min()}, {values.max()}")


def slots_of(batch: StepBatch, block_size: int) -> Slots:
    """Places of a checked step's tokens."""
    positions = np.asarray(batch.positions, np.intp)
    blocks = np.empty(len(positions), np.intp)
    for (start, length), table in zip(batch.rows, batch.block_tables, strict=True):
        first = int(positions[start]) // block_size
        own = np.asarray(table[first : int(positions[start + length - 1]) // block_size + 1], np.intp)
        blocks[start : start + length] = own[positions[start : start + length] // block_size - first]
    return Slots(positions, blocks, positions % block_size)


def part_of(batch: StepBatch, tokens: slice) -> StepBatch:
    """Some tokens of a checked step, which may begin and end within a request."""
    rows, tables = [], []
    for (start, length), table in zip(batch.rows, batch.block_tables, strict=True):
        first, end = max(start, tokens.start), min(start + length, tokens.stop)
        if first < end:
            rows.append((first - tokens.start, end - first))
            tables.append(table)
    wanted = np.asarray(batch.logits_rows)
    wanted = wanted[(wanted >= tokens.start) & (wanted < tokens.stop)] - tokens.start
    return StepBatch(batch.token_ids[tokens], batch.positions[tokens], rows, tables, wanted)
