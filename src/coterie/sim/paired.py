"""How much better one policy is than another, from runs in pairs: both met the same requests at the same times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from coterie.errors import InputError


@dataclass(frozen=True, slots=True)
class PairedChange:
    """Change of a figure, mean over seeds.

    Attributes:
        mean: of `own / other - 1`; below zero where `own` is lower.
        low: lower end of its 95 % interval (Student's t over the seeds); minus infinity for a single seed.
        high: upper end.
    """

    mean: float
    low: float
    high: float


def paired_change(own: Sequence[float], other: Sequence[float]) -> PairedChange:
    """Compare two policies' figures, each pair of one seed.

    Args:
        own: figures of one policy.
        other: of the other, in the same order of seeds; above zero.

    Raises:
        InputError: there are none, or their numbers differ.
    """
    if not own or len(own) != len(other):
        raise InputError(f"paired change: {len(own)} figures of one policy, {len(other)} of the other")
    changes = np.array(own) / np.array(other) - 1
    mean = float(changes.mean())
    if len(own) == 1:
        return PairedChange(mean, -math.inf, math.inf)
    half = float(student.ppf(0.975, len(own) - 1) * changes.std(ddof=1) / math.sqrt(len(own)))
    return PairedChange(mean, mean - half, mean + half)
