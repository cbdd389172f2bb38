"""What is chosen about the model, its training and its measurement; no torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NAME = "coterie-tiny"
LAYERS, EXPERTS, TOP_K = 5, 64, 4
VOCABULARY = 4096
END = 0  # id of <|endoftext|>, between documents
TEMPERATURE = 0.8  # of recorded outputs

Stream = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train.

    Attributes:
        steps: optimizer steps.
        batch: sequences of a step, the same number from each domain.
        length: tokens of a sequence.
        learning_rate: its peak, after `warmup` steps; it falls to a twentieth along a cosine.
        warmup: steps.
        decay: weight decay of matrices.
        balance: weight of the load-balance loss.
        seed: of the initial weights, and with the step's number of each batch.
    """

    steps: int = 3200
    batch: int = 8
    length: int = 256
    learning_rate: float = 3e-3
    warmup: int = 30
    decay: float = 0.1
    balance: float = 0.01
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """What a training has used so far, over all the runs that it was resumed in."""

    step: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of step `step`, counted from 0."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * min(1.0, (step + 1) / settings.warmup) * (0.05 + 0.95 * cosine)


def draw_batch(settings: Settings, step: int, streams: Mapping[str, Stream]) -> npt.NDArray[np.int64]:
    """`[batch, length]` ids of step `step`, which depend on nothing but the seed, the step and the streams.

    Raises:
        ValueError: the batch does not divide into equal shares of the domains.
    """
    each, rest = divmod(settings.batch, len(streams))
    if rest:
        raise ValueError(f"a batch of {settings.batch} sequences does not divide into {len(streams)} domains")
    rng = np.random.default_rng([settings.seed, step])
    rows = [
        ids[start : start + settings.length]
        for ids in streams.values()
        for start in rng.integers(0, len(ids) - settings.length, each)
    ]
    return np.stack(rows).astype(np.int64)
