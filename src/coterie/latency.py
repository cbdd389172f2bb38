"""How long an engine takes: decode steps by their active experts, prefill and handoff by their tokens."""

from __future__ import annotations

import csv
import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy.optimize import nnls

from coterie.errors import ConfigError, InputError
from coterie.files import read_text

COLUMNS = ("requests", "active_experts", "step_ms")
"""Columns of a file of measured steps, see `read_step_points`."""

_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one decode step.

        step_s = fixed_s + per_request_s * requests + per_expert_s * active + rest(requests)

    While decoding is bound by memory, a step reads the weights of every expert that at least one of its requests
    chose, once, however many chose it: that is the last term, and `active` counts (layer, expert) pairs over all MoE
    layers (ELDR section on motivation: at a fixed number of active experts, the batch size hardly matters).  The
    second term is what each request adds by itself: its attention, its sampling, its tokens in the shared layers.
    The first is what any step costs: weights that every token passes through, and launches.  The last is for engines
    whose other kernels do not grow evenly with the batch: straight lines between measured points, level beyond them.

    Attributes:
        fixed_s: seconds of any step.
        per_request_s: seconds for each request of the batch.
        per_expert_s: seconds for each active expert of each layer.
        rest: points (requests, seconds), requests ascending; none for no such part.

    Raises:
        InputError: a constant is negative or not finite, the points are not as described, or a step could take no time.
    """

    fixed_s: float
    per_request_s: float
    per_expert_s: float
    rest: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _check_constants(self, "fixed_s", "per_request_s", "per_expert_s")
        _check_rest(self.rest)
        if not (self.fixed_s or self.per_request_s or self.per_expert_s or any(seconds for _, seconds in self.rest)):
            raise InputError("step time: all constants are zero; time would stand still")

    def step_s(self, requests: float, active: float) -> float:
        """Seconds of a step with `requests` requests and `active` (layer, expert) pairs."""
        seconds = self.fixed_s + self.per_request_s * requests + self.per_expert_s * active
        return seconds + _interpolate(self.rest, requests) if self.rest else seconds


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """`numpy.interp` for one x, without its cost: a simulation asks at each step."""
    above = bisect_right(points, x, key=lambda point: point[0])
    if above in (0, len(points)):
        return points[min(above, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[above - 1 : above + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _check_rest(points: Sequence[tuple[float, float]]) -> None:
    last = -math.inf
    for requests, seconds in points:
        if not (math.isfinite(requests) and requests > last):
            raise InputError(f"step time: the points of rest must ascend in requests, got {requests:g} after {last:g}")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InputError(f"step time: rest at {requests:g} requests must be finite and not negative, got {seconds}")
        last = requests


@dataclass(frozen=True, slots=True)
class TokenTime:
    """A time that grows with tokens: of a prefill step, or of handing over a prompt's KV.

        seconds = fixed_s + per_token_s * tokens

    Attributes:
        fixed_s: seconds, however few the tokens.
        per_token_s: seconds for each token.

    Raises:
        InputError: a constant is negative or not finite.
    """

    fixed_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        _check_constants(self, "fixed_s", "per_token_s")

    def seconds(self, tokens: int) -> float:
        """Seconds for this many tokens."""
        return self.fixed_s + self.per_token_s * tokens


def _check_constants(times: Any, *names: str) -> None:
    for name in names:
        value = getattr(times, name)
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"latency: {name} must be finite and not negative, got {value}")


# --- fitting ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One measured decode step, or the mean of several alike.

    Attributes:
        requests: size of its batch.
        active: (layer, expert) pairs that it activated.
        step_s: seconds that it took.

    Raises:
        InputError: a value is not finite, or not above zero.
    """

    requests: float
    active: float
    step_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"step point: {field.name} must be finite and above zero, got {value}")


def fit_step_time(points: Sequence[StepPoint]) -> StepTime:
    """Fit the constants to measured steps by least squares.

        min over constants >= 0 of  sum over points of (predicted / measured - 1)^2

    Errors are relative, since the scatter of timings grows with what is timed.

    Raises:
        InputError: the points cannot tell the three parts apart.
    """
    rows = np.array([(1.0, point.requests, point.active) for point in points]).reshape(-1, 3)
    scale = rows.max(axis=0, initial=1e-300)
    relative = rows / scale / np.array([point.step_s for point in points]).reshape(-1, 1)
    if np.linalg.matrix_rank(rows / scale, tol=1e-6) < 3:
        raise InputError(
            f"step time: {len(points)} points cannot tell the fixed part, the part per request and the part per active "
            "expert from one another; measure steps in which requests and active experts vary by themselves"
        )
    constants, _ = nnls(relative, np.ones(len(points)))
    fixed_s, per_request_s, per_expert_s = (constants / scale).tolist()
    return StepTime(fixed_s, per_request_s, per_expert_s)


def mean_error(times: StepTime, points: Sequence[StepPoint]) -> float:
    """Mean of |predicted / measured - 1| over the points, at least one."""
    return float(np.mean([abs(times.step_s(p.requests, p.active) / p.step_s - 1) for p in points]))


def read_step_points(path: str | os.PathLike[str]) -> tuple[StepPoint, ...]:
    """Read measured steps from a CSV file with the columns `requests,active_experts,step_ms`.

    `active_experts` counts (layer, expert) pairs: the sum over the MoE layers.

    Raises:
        ConfigError: the file cannot be read or has other columns, or a value is no number above zero.
    """
    header, *rows = list(csv.reader(read_text(path, _MOST_BYTES).splitlines())) or [[]]
    if tuple(header) != COLUMNS:
        raise ConfigError(f"{path}: the first line must be {','.join(COLUMNS)}, not {','.join(header)[:100]!r}")
    return tuple(_read_point(path, number, row) for number, row in enumerate(rows, start=2))


def _read_point(path: str | os.PathLike[str], number: int, row: Sequence[str]) -> StepPoint:
    try:
        requests, active, step_ms = map(float, row)
        return StepPoint(requests, active, step_ms / 1000)
    except (ValueError, InputError) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from None


# --- constants for clusters that were not measured ------------------------------------------------------------

QWEN3_30B_MI300X = StepTime(fixed_s=7.6e-3, per_request_s=35e-6, per_expert_s=3.06e-6)
"""Qwen3-30B-A3B (48 layers of 128 experts, top-8) on one MI300X.

- `per_expert_s`: ELDR Figure 2a.  A layer that activates 128 experts takes 4.7 times as long as one that activates 16,
  and about 0.35 ms at 100: a straight line through these has a slope of 3.06 us (0.147 ms for one more expert in each
  of 48 layers).
- `fixed_s`, `per_request_s`: set by hand so that round robin comes near the TPOT that ELDR's artifact lists for this
  model at 8P16D; not a fit.
"""

PREFILL_MI300X = TokenTime(fixed_s=50e-3, per_token_s=20e-6)
"""A prefill step of the same model: set by hand to the order of the TTFT that ELDR's artifact lists (60 to 70 ms)."""

HANDOFF_400G = TokenTime(fixed_s=2e-3, per_token_s=2e-6)
"""KV over a 400 Gb/s link: 98,304 bytes a token (48 layers x 2 x 4 heads x 128 x 2 bytes, the model's public
configuration) take 2 us; the fixed part is a guess at the handshake."""
