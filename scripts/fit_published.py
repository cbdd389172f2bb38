"""Fit the constants of made-up workloads to the published figures that are marked `fit`.

    python scripts/fit_published.py                     # writes src/coterie/published/fitted.toml, in some minutes
    python scripts/fit_published.py --published DIR --out FILE

1. The generator (`coterie.sim.generator`): its constants are those that give the statistics of ELDR's section on
   motivation and of its Figure 7 best, in the mean over models, and are least unlike the guesses in `PRIOR`.
2. The step time (`coterie.latency`): the part of the experts from Figure 2a and the bytes of an expert; the rest from
   the TPOT of round robin at five rates.

It sees nothing else: the rows that are marked `compare` are dropped as soon as they are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from coterie.analysis import DecodeUse
from coterie.core import ModelGeometry
from coterie.published import FOLDER, Check, Fitted, FittedSpread, FittedStep, Published, dump_fitted, load_published
from coterie.reproduce.motivation import BATCH_SIZES, Motivation, measure
from coterie.signature import Kind
from coterie.sim.generator import Spread, make_trace
from coterie.sim.made import recipe_of

Constants = Mapping[str, float]
Floats = npt.NDArray[np.float64]

PRIOR: Constants = {
    "repeat": 4.0,
    "shared": 1.0,
    "request": 0.4,
    "phase": 0.3,
    "task.domain": 1.4,
    "task.topic": 0.6,
    "language.domain": 0.7,
    "language.topic": 0.6,
}
"""Guesses, in the order of magnitude of what trained routers do.  More constants than statistics: these decide what the
statistics leave open, and no more than that."""

_DOUBT = 0.7  # standard deviation of the logarithm of a guess
_SHIFT, _STEP = 10.0, 0.02  # steps of differentiation are relative: 0.2 units here, well above the noise of drawing
_ROUNDING = 1.0  # of a change in whole per cent
_READING = 0.03  # of a correlation that was read off a figure
_KINDS: tuple[Kind, ...] = ("count_idf", "count", "binary")
_CHANGES = ("largest change by same-domain batches", "smallest change by same-domain batches")
_RS = ("least r of prefill and decode", "largest r of prefill and decode")
_DECODERS = 16
_LAYERS = 4
_DRAWS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, default=FOLDER, help="folder with the published figures")
    parser.add_argument("--out", type=Path, default=FOLDER / "fitted.toml", help="file to write")
    parser.add_argument("--requests", type=int, default=600, help="of each made-up trace")
    parser.add_argument("--rounds", type=int, default=10, help="of the generator's fit; 0 keeps the guesses")
    given = parser.parse_args()
    published = load_published(given.published).to_fit()
    given.out.write_text(dump_fitted(fit(published, given.requests, given.rounds)), encoding="utf-8")


def fit(published: Published, requests: int, rounds: int) -> Fitted:
    """All constants."""
    constants, wanted = fit_generator(published, requests, rounds), targets(published)
    spread = {workload: spread_of(constants, workload) for workload in published.workloads}
    return Fitted(
        constants["repeat"],
        {
            workload: FittedSpread(*(getattr(one, name) for name in FittedSpread.__struct_fields__))
            for workload, one in spread.items()
        },
        {model: fit_step(published, constants, model, requests) for model in published.models},
        [Check(name, wanted[name][0], found) for name, found in statistics(published, constants, requests).items()],
    )


# --- the generator -------------------------------------------------------------------------------------------------


def fit_generator(published: Published, requests: int, rounds: int) -> Constants:
    """The constants with the least sum of squares.

    Statistics are off in units of how well they are known, constants in units of how well they are guessed:

        constant = guess * exp(_DOUBT * off)
    """
    guesses = np.array(list(PRIOR.values()))
    middles, widths = np.array(list(targets(published).values())).T

    def constants(off: Floats) -> Constants:
        return dict(zip(PRIOR, (guesses * np.exp(_DOUBT * off)).tolist(), strict=True))

    def residuals(shifted: Floats) -> Floats:
        found = np.array(list(statistics(published, constants(shifted - _SHIFT), requests).values()))
        return np.concatenate([(found - middles) / widths, shifted - _SHIFT])

    if not rounds:
        return PRIOR
    start = np.full(len(guesses), _SHIFT)
    return constants(least_squares(residuals, start, diff_step=_STEP, max_nfev=rounds).x - _SHIFT)


def targets(published: Published) -> dict[str, tuple[float, float]]:
    """Each statistic's published value and the error of reading it.

    Both ends of a range over models and batch sizes are figures by themselves: its width is how much these differ, not
    how well their mean is known.
    """
    found = {}
    for workload in published.workloads:
        row = published.figure("motivation", "same_domain_active", workload=workload)
        found |= {
            f"{workload}: {name}": (end, _ROUNDING) for name, end in zip(_CHANGES, (row.low, row.high), strict=True)
        }
    row = published.figure("motivation", "prefill_decode_r")
    found |= {name: (end, _READING) for name, end in zip(_RS, (row.low, row.high), strict=True)}
    for kind in _KINDS:
        row = published.figure("motivation", "rho", setting=f"{kind}, mean of six cells")
        found[f"rho of {kind}"] = (row.middle, _READING)
    row = published.figure("motivation", "rho", workload="language", model="gptoss")
    return {**found, "language, gptoss: rho of count_idf": (row.middle, _READING)}


def statistics(published: Published, constants: Constants, requests: int) -> dict[str, float]:
    """What the constants give for each of `targets`, in its order."""
    top_k = {model: published.models[model].top_k for model in published.measured}
    measured = {
        (workload, k): motivation(published, constants, workload, k, requests)
        for workload in published.workloads
        for k in set(top_k.values())
    }
    cells = {(workload, model): measured[workload, k] for workload in published.workloads for model, k in top_k.items()}
    found = {}
    for workload in published.workloads:
        changes = [-100 * cells[workload, model].same_domain[size] for model in top_k for size in BATCH_SIZES]
        found |= {f"{workload}: {name}": end for name, end in zip(_CHANGES, (min(changes), max(changes)), strict=True)}
    rs = [one.r for one in cells.values()]
    found |= dict(zip(_RS, (min(rs), max(rs)), strict=True))
    found |= {f"rho of {kind}": float(np.mean([one.rho[kind] for one in cells.values()])) for kind in _KINDS}
    return {**found, "language, gptoss: rho of count_idf": cells["language", "gptoss"].rho["count_idf"]}


def motivation(published: Published, constants: Constants, workload: str, top_k: int, requests: int) -> Motivation:
    """Measure a workload on a model of this top-k."""
    about = published.workloads[workload]
    recipe = recipe_of(about, spread_of(constants, workload), constants["repeat"])
    return measure(recipe, about, ModelGeometry(_LAYERS, 128, top_k), requests, kinds=_KINDS)


def spread_of(constants: Constants, workload: str) -> Spread:
    """The spread of a workload: some parts are its own."""
    own = {part: constants[f"{workload}.{part}"] for part in ("domain", "topic")}
    return Spread(constants["shared"], own["domain"], own["topic"], constants["request"], constants["phase"])


# --- the step time -------------------------------------------------------------------------------------------------


def fit_step(published: Published, constants: Constants, model: str, requests: int) -> FittedStep:
    """The expert part by bytes, and a table of what is left of round robin's TPOT at each rate.

    The batch follows from TPOT: a decode worker holds rate / workers * output tokens * TPOT requests (Little's law).
    Of a model that has no published TPOT it is assumed that the rest of a layer takes as long as one of Qwen3-30B-A3B.
    """
    if model not in published.measured:
        return scaled(fit_step(published, constants, "qwen", requests), published, model)
    per_expert_s = expert_s(published) * published.models[model].expert_bytes / published.models["qwen"].expert_bytes
    points: dict[float, list[tuple[float, float]]] = {}
    for workload, about in published.workloads.items():
        active = RandomBatches(published, constants, workload, model, requests)
        for row in published.tpot:
            if (row.workload, row.model) == (workload, model):
                batch = row.rate / _DECODERS * about.output_tokens * row.tpot_p50_ms / 1e3
                rest_s = row.tpot_p50_ms / 1e3 - per_expert_s * active(round(batch))
                points.setdefault(row.rate, []).append((batch, rest_s))
    batches, rest = np.array([np.mean(points[rate], axis=0) for rate in sorted(points)]).T  # of both workloads
    slope = max(0.0, float(np.polyfit(batches, rest, 1)[0]))
    return FittedStep(slope, per_expert_s, level(batches.tolist(), (rest - slope * batches).tolist()))


def level(batches: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """A table that is level around each batch and changes within one request half-way between two.

    What does not grow evenly jumps: kernels and graphs are chosen by the batch.  Straight lines between points would
    have a step hang on each request by up to 0.18 ms; by Figure 2a it is 0.05 ms (48 layers of 0.1 ms for 96 requests).
    """
    points = [(batches[0], values[0])]
    for left, right, before, after in zip(batches, batches[1:], values, values[1:], strict=False):
        middle = (left + right) / 2
        points += [(middle - 0.5, before), (middle + 0.5, after)]
    return [*points, (batches[-1], values[-1])]


def scaled(qwen: FittedStep, published: Published, model: str) -> FittedStep:
    """The step time of a model with more layers and larger experts than Qwen3-30B-A3B."""
    of, base = published.models[model], published.models["qwen"]
    layers = of.layers / base.layers
    return FittedStep(
        qwen.per_request_s * layers,
        qwen.per_expert_s * of.expert_bytes / base.expert_bytes,
        [(requests, seconds * layers) for requests, seconds in qwen.rest],
    )


def expert_s(published: Published) -> float:
    """Seconds for one more active expert in a layer of Qwen3-30B-A3B.

    fixed + 128 s = ratio (fixed + 16 s),   fixed + 100 s = time
    """
    ratio = published.figure("layer_time", "ratio_16_to_128_active").middle
    time_s = published.figure("layer_time", "ms_at_100_active", setting="batch 32").middle / 1e3
    return time_s / ((128 - 16 * ratio) / (ratio - 1) + 100)


class RandomBatches:
    """Batches as round robin makes them; call it for their active experts, of all layers of the model."""

    def __init__(self, published: Published, constants: Constants, workload: str, model: str, requests: int) -> None:
        of, about = published.models[model], published.workloads[workload]
        recipe = recipe_of(about, spread_of(constants, workload), constants["repeat"])
        trace = make_trace(recipe, ModelGeometry(_LAYERS, of.experts, of.top_k), requests, seed=0)
        self._use, self._layers = DecodeUse(trace.decode, trace.decode_covered), of.layers

    def __call__(self, batch: int) -> float:
        rng = np.random.default_rng(batch)
        batches = [rng.choice(len(self._use.tokens), batch, replace=False) for _ in range(_DRAWS)]
        return self._layers * float(self._use.active(batches).mean())


if __name__ == "__main__":
    main()
