"""The constants that `scripts/fit_published.py` fits, and their file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from coterie.published.records import FOLDER, read_toml

_HEAD = "# Written by scripts/fit_published.py from the rows that are marked `fit`.  Do not edit.\n"


class FittedSpread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Standard deviations of the parts of a routing logit: see `sim.generator.Spread`."""

    shared: float
    domain: float
    topic: float
    request: float
    phase: float


class FittedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The step time of a model: see `latency.StepTime`.

    Attributes:
        per_request_s: seconds for each request.
        per_expert_s: seconds for each active expert of each of the model's layers.
        rest: points (requests, seconds).
    """

    per_request_s: float
    per_expert_s: float
    rest: list[tuple[float, float]]


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the fitted constants give for a figure that they were fitted to.

    Attributes:
        statistic: its name.
        target: as published; the middle of a range.
        fitted: as the constants have it.
    """

    statistic: str
    target: float
    fitted: float


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All fitted constants.

    Attributes:
        repeat: tokens of a text that choose alike: see `sim.generator.Recipe`.
        spread: by workload.
        step: by model.
        check: how near they come.
    """

    repeat: float
    spread: dict[str, FittedSpread]
    step: dict[str, FittedStep]
    check: list[Check]


def load_fitted(path: Path = FOLDER / "fitted.toml") -> Fitted:
    """Read fitted constants.

    Raises:
        InputError: the file cannot be read or is not as described.
    """
    return read_toml(path, Fitted)


def dump_fitted(fitted: Fitted) -> str:
    """The text of a file of fitted constants: five significant digits."""
    parts = [_HEAD, _lines({"repeat": fitted.repeat})]
    for workload, spread in fitted.spread.items():
        parts.append(f"[spread.{workload}]\n{_lines(msgspec.structs.asdict(spread))}")
    for model, step in fitted.step.items():
        rest = ", ".join(f"[{requests:.5g}, {seconds:.5g}]" for requests, seconds in step.rest)
        constants = {"per_request_s": step.per_request_s, "per_expert_s": step.per_expert_s}
        parts.append(f"[step.{model}]\n{_lines(constants)}rest = [{rest}]\n")
    for check in fitted.check:
        figures = {"target": check.target, "fitted": check.fitted}
        parts.append(f'[[check]]\nstatistic = "{check.statistic}"\n{_lines(figures)}')
    return "\n".join(parts)


def _lines(values: Mapping[str, float]) -> str:
    """TOML needs a point or an exponent to see a float in a whole number."""
    texts = {name: f"{value:.5g}" for name, value in values.items()}
    return "".join(f"{name} = {text if set(text) & set('.e') else text + '.0'}\n" for name, text in texts.items())
