"""Makes a packing more even by swaps between its busiest rank and others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ROUNDING = 1e-12  # part; a swap that gains less is none


def swap_while_better(parts: Floats, holds: Bools) -> None:
    """Swap experts of the busiest rank with lighter ones of others, the best swap first, while that makes it lighter.

    Args:
        parts: `[R, E]` load that each rank has of each expert; changed.
        holds: `[R, E]` whether a rank holds an expert, be its part 0; changed.
    """
    loads = parts.sum(axis=1)
    while (swap := _best_swap(parts, holds, loads)) is not None:
        here, out, there, into = swap
        moved = parts[here, out] - parts[there, into]
        parts[there, out], parts[here, into] = parts[here, out], parts[there, into]
        parts[here, out] = parts[there, into] = 0
        holds[[here, there], [into, out]], holds[[here, there], [out, into]] = True, False
        loads[[here, there]] += -moved, moved


def _best_swap(parts: Floats, holds: Bools, loads: Floats) -> tuple[int, int, int, int] | None:
    """The busiest rank, an expert of it, another rank and its expert, whose swap leaves the busier of both lightest."""
    here = int(loads.argmax())
    mine = np.flatnonzero(holds[here])
    there, theirs = np.nonzero(holds & ~holds[here])
    if not there.size:
        return None
    moved = parts[here, mine, None] - parts[there, theirs]  # [own experts, others' replicas]
    after = np.maximum(loads[here] - moved, loads[there] + moved)
    after[holds[there][:, mine].T] = np.inf  # they hold one already
    own, other = divmod(int(after.argmin()), len(there))
    gains = after[own, other] < loads[here] * (1 - _ROUNDING)
    return (here, int(mine[own]), int(there[other]), int(theirs[other])) if gains else None
