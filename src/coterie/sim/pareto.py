"""What a policy costs whom, and which policies others are better than in every way."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.sim.outcomes import Outcomes
from coterie.sim.workload import Population


def domain_medians_ms(outcomes: Outcomes, population: Population) -> dict[str, float]:
    """Median time per output token of the requests of each domain, by name.

    Requests without a label, and domains without a request of two tokens, are left out.

    Args:
        outcomes: of a simulation.
        population: what its requests were drawn from.
    """
    labels = np.array([request.domain or "" for request in population.requests])[np.asarray(outcomes.position)]
    tpots = np.asarray(outcomes.tpot_s)
    known = ~np.isnan(tpots)
    names = sorted(set(labels[known].tolist()) - {""})
    return {name: 1000 * float(np.median(tpots[known & (labels == name)])) for name in names}


def front(figures: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.bool_]:
    """Which of several are not dominated: none other is as good in every figure, and better in one.

    Args:
        figures: `[N, M]`, lower is better.

    Returns:
        `[N]`.
    """
    as_good = (figures[:, None] <= figures[None]).all(axis=-1)
    better = (figures[:, None] < figures[None]).any(axis=-1)
    on_front: npt.NDArray[np.bool_] = np.logical_not((as_good & better).any(axis=0))
    return on_front
