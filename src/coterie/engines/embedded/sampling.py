"""From logits to tokens.  A row's token depends on its own logits, parameters and position, never on other rows.

    p_i ~ exp(logit_i / temperature)         over the top_k most probable tokens, then over the fewest of these
                                             whose probability is at least top_p; ties go to lower ids

The token is the one at which the sum of p over ascending ids passes u, a uniform number of its own: a hash of the
request's seed, the number of the output among those of the request, and the position.  So a request that is batched
otherwise, preempted or repeated draws the same tokens.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this choose the most probable token, as in vLLM."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
_SEEDS = 1 << 64

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens of the output; None for as many as fit the model and the cache.
        min_tokens: tokens before which neither an end token nor a stop string ends the output.
        temperature: 0 chooses the most probable token.
        top_p: probability that the kept tokens have at least, in (0, 1].
        top_k: most tokens kept; 0 for all.
        seed: of the request's random numbers; None to let the engine choose one.
        stop: strings that end the output, which is cut before them.
        stop_token_ids: tokens that end the output; they are counted, but their text is not part of it.
        ignore_eos: whether the model's own end tokens do not end the output.

    Raises:
        RequestError: a value is out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        most = self.max_tokens if self.max_tokens is not None else self.min_tokens
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, "from 0 to max_tokens")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "finite and at least 0")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 1, or 0 for all tokens")
        _check("seed", self.seed, self.seed is None or -_SEEDS // 2 <= self.seed < _SEEDS, "of at most 64 bits")
        _check("stop", f"{len(self.stop)} strings", len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} strings")
        for text in self.stop:
            fits = 1 <= len(text) <= MAX_STOP_CHARACTERS
            _check("stop", text[:40], fits, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature < GREEDY_BELOW


def _check(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise RequestError(f"{name}: must be {allowed}, got {value!r}", name)


@dataclass(frozen=True, slots=True)
class Draw:
    """What the next token of one request is chosen by.

    Attributes:
        params: the request's parameters, with a seed unless greedy.
        choice: number of the output among those of one request (its `n`).
        position: of the token, from the first of the prompt on.
        forbidden: tokens that may not be chosen: those that would end the output before `min_tokens`.
    """

    params: SamplingParams
    choice: int
    position: int
    forbidden: frozenset[int] = frozenset()


def sample(logits: Floats, draws: Sequence[Draw]) -> list[int | None]:
    """Choose the next token of each row; None where the row holds a logit that is no number, or an infinite one.

    Args:
        logits: `[R, V]`.
        draws: one for each row.
    """
    if not draws:
        return []
    best = logits.argmax(axis=1)  # of equal logits the lowest id, and of what is no number the first
    usable = np.isfinite(logits[np.arange(len(best)), best])
    return [_token(*row) for row in zip(logits, best.tolist(), usable.tolist(), draws, strict=True)]


def _token(logits: Floats, best: int, usable: bool, draw: Draw) -> int | None:
    if not usable:
        return None
    return _sample_row(logits, draw) if draw.forbidden or not draw.params.greedy else best


def _sample_row(logits: Floats, draw: Draw) -> int:
    allowed = logits.astype(np.float64)  # a row of its own: how it is summed cannot depend on the batch
    if draw.forbidden:
        allowed[list(draw.forbidden)] = -np.inf
    params = draw.params
    if params.greedy:
        return int(allowed.argmax())
    kept = _most(allowed, params.top_k) if 0 < params.top_k < len(allowed) else None
    values = allowed if kept is None else allowed[kept]
    chances = np.exp((values - values.max()) / params.temperature)
    if params.top_p < 1:
        nucleus = _nucleus(chances, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        chances = chances[nucleus]
    index = _at(chances, uniform(params.seed or 0, draw.choice, draw.position))
    return index if kept is None else int(kept[index])


def _most(values: npt.NDArray[np.float64], count: int) -> Indices:
    """Ascending indices of the `count` largest of more values; of equal values the lowest indices."""
    # The least of the maxima of `count` groups: so many values reach it, and few others, so few are left to compare.
    bound = values[: len(values) // count * count].reshape(-1, count).max(axis=0).min()
    candidates = np.flatnonzero(values >= bound)
    near = values[candidates]
    least = np.partition(near, len(near) - count)[len(near) - count]
    return candidates[_at_least(near, least, count)]


def _at_least(values: npt.NDArray[np.float64], least: np.float64, count: int) -> Indices:
    """Ascending indices of `count` values, none below `least`, of which there are enough; of the equal, the lowest."""
    above = values > least
    equal = np.flatnonzero(values == least)[: count - np.count_nonzero(above)]
    above[equal] = True
    return np.flatnonzero(above)


def _nucleus(chances: npt.NDArray[np.float64], top_p: float) -> Indices:
    """Ascending indices of the fewest chances that make up `top_p` of their sum (arXiv 1904.09751)."""
    whole = chances.sum()
    # Those below this have less than 1 - top_p among them all, so none is needed: few are left to sort.
    candidates = np.flatnonzero(chances >= (1 - top_p) * whole / len(chances))
    near = chances[candidates]
    ordered = np.sort(near)[::-1]
    count = min(int(ordered.cumsum().searchsorted(top_p * whole)) + 1, len(ordered))
    return candidates[_at_least(near, ordered[count - 1], count)]


def _at(chances: npt.NDArray[np.float64], u: float) -> int:
    """Index at which the running sum passes `u` of the whole; never one without a chance."""
    total = chances.cumsum()
    return int(total.searchsorted(u * total[-1], side="right"))


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that these three determine: 53 bits of their BLAKE2b hash."""
    key = struct.pack("<QQQ", seed % _SEEDS, choice, position)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / (1 << 53)
