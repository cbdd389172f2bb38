"""What `coterie simulate` serves: a recorded trace, or a workload made up to published statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from msgspec.structs import replace

from coterie.activations import ActivationTrace
from coterie.calibration import Profile, fit
from coterie.errors import ConfigError
from coterie.latency import QWEN3_30B_MI300X, StepTime, fit_step_time, mean_error, read_step_points
from coterie.published import load_published
from coterie.sim import Population, population_of
from coterie.sim.made import made_workload


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Requests to serve, and what goes with them.

    Attributes:
        title: what they are.
        population: the requests.
        trace: labelled requests for policies to learn from.
        profile: for policies that need one; None where none was given.
        step_time: of decode steps.
        notes: what weakens figures, in sentences.
    """

    title: str
    population: Population
    trace: ActivationTrace
    profile: Profile | None
    step_time: StepTime
    notes: tuple[str, ...]


def made_names() -> tuple[str, ...]:
    """Names of workloads that are made up."""
    return tuple(load_published().workloads)


def model_names() -> tuple[str, ...]:
    """Names of models that they can be of."""
    return tuple(load_published().models)


def recorded(
    file: Path, profile: Path | None, steps: Path | None, output_tokens: int | None, *, model: str | None
) -> Source:
    """A trace of `coterie collect`.

    Raises:
        InputError: a file cannot be used, or they do not go together.
    """
    if model is not None:
        raise ConfigError(f"--model goes with a workload that is made up ({', '.join(made_names())}), not with a trace")
    trace = ActivationTrace.load(file)
    found = Profile.load(profile) if profile else None
    if found is not None and found.geometry != trace.geometry:
        raise ConfigError(f"{profile} is of {found.geometry}, {file} of {trace.geometry}")
    notes = []
    if trace.decode_ids is None:
        notes.append("Active experts are expected values: the trace has no expert ids of output tokens.")
    if found is not None and found.trace_digest == trace.digest():
        notes.append("The profile was fitted to these very requests: others would gain less.")
    if steps is None:
        notes.append("Step times are those of Qwen3-30B-A3B on an MI300X; give --steps for yours.")
    return Source(
        f"{trace.model} ({trace.geometry}), {len(trace)} recorded requests",
        population_of(trace, output_tokens=output_tokens),
        trace,
        found,
        _measured(steps) if steps else QWEN3_30B_MI300X,
        tuple(notes),
    )


def made(
    workload: str, model: str | None, clusters: int | None, seed: int, output_tokens: int | None, *, given: bool
) -> Source:
    """A workload that is made up.

    Args:
        workload: its name.
        model: that it is of; the first of those published by default.
        clusters: of a profile to fit to other requests of its kind; None for no profile.
        seed: of all that is drawn.
        output_tokens: of each request; by default as the workload has them.
        given: whether there is a profile or a file of steps, which are of something that was measured.

    Raises:
        ConfigError: the workload brings its own profile and step times.
    """
    if given:
        raise ConfigError(f"--profile and --steps go with a trace; the workload {workload} has made-up ones")
    found = made_workload(workload, model or model_names()[0], seed=seed)
    trace = found.calibration
    return Source(
        f"made-up {workload} requests to {trace.model}, {trace.geometry.layers} of its MoE layers",
        _of_length(found.population, output_tokens) if output_tokens else found.population,
        trace,
        fit(trace, clusters, seed=seed) if clusters else None,
        found.step_time,
        ("Requests, their experts and step times are made up to fit published statistics: nothing here was measured.",),
    )


def _of_length(population: Population, output_tokens: int) -> Population:
    requests = tuple(replace(request, output_tokens=output_tokens) for request in population.requests)
    return Population(requests, population.experts)


def _measured(file: Path) -> StepTime:
    points = read_step_points(file)
    times = fit_step_time(points)
    click.echo(
        f"step: {times.fixed_s * 1e3:.3g} ms + {times.per_request_s * 1e6:.3g} us x requests + "
        f"{times.per_expert_s * 1e6:.3g} us x active experts of all layers; "
        f"mean error {mean_error(times, points):.1%} over {len(points)} points",
        err=True,
    )
    return times
