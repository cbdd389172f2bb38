"""Workloads as published statistics have them: generator and step times with the constants that were fitted."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coterie.activations import ActivationTrace
from coterie.core import ModelGeometry
from coterie.errors import ConfigError
from coterie.latency import StepTime
from coterie.published import Domain, FittedStep, Model, Workload, load_fitted, load_published
from coterie.sim.generator import Lengths, Recipe, Spread, Topic, make_trace
from coterie.sim.workload import Population, population_of

LAYERS = 6
"""Layers that are made up of a model, whatever it has; all behave alike, and more only cost time."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A made-up workload on a model.

    Attributes:
        population: what to serve.
        calibration: other requests of the same workload, labelled and with outputs, to fit profiles to.
        step_time: of decode steps; an active expert of a made-up layer stands for one in each of the layers that the
            made-up one stands for.
    """

    population: Population
    calibration: ActivationTrace
    step_time: StepTime


def made_workload(
    workload: str,
    model: str = "qwen",
    *,
    seed: int = 0,
    requests: int = 1500,
    calibration: int = 1000,
) -> Made:
    """Make up a workload of ELDR section 1.4 on one of its models.

    Args:
        workload: a key of `Published.workloads`.
        model: a key of `Published.models`.
        seed: of all that is drawn.
        requests: to serve.
        calibration: to fit profiles to; as many as in the paper by default.

    Raises:
        ConfigError: there is no such workload or model.
    """
    published, fitted = load_published(), load_fitted()
    for name, known in ((workload, published.workloads), (model, published.models)):
        if name not in known:
            raise ConfigError(f"no published workload or model is named {name!r}; there are {', '.join(known)}")
    of, about = published.models[model], published.workloads[workload]
    recipe = recipe_of(about, Spread(**msgspec.structs.asdict(fitted.spread[workload])), fitted.repeat)
    served = make_trace(recipe, geometry_of(of), requests, seed=seed, model=of.name)
    return Made(
        population_of(served),
        make_trace(recipe, geometry_of(of), calibration, seed=seed, sample=1, model=of.name),
        step_time_of(fitted.step[model], of),
    )


def geometry_of(model: Model) -> ModelGeometry:
    """The made-up part of a model."""
    return ModelGeometry(LAYERS, model.experts, model.top_k)


def step_time_of(step: FittedStep, model: Model) -> StepTime:
    """A model's step time, by the active experts of its made-up part."""
    rest = tuple((requests, seconds) for requests, seconds in step.rest)
    return StepTime(0.0, step.per_request_s, step.per_expert_s * model.layers / LAYERS, rest)


def recipe_of(workload: Workload, spread: Spread, repeat: float) -> Recipe:
    """What a published workload is made of."""
    return Recipe(
        spread,
        tuple(topic for name, domain in workload.domains.items() for topic in _topics(name, domain, workload)),
        Lengths(**msgspec.structs.asdict(workload.prompts)),
        workload.output_tokens,
        repeat,
    )


def _topics(name: str, domain: Domain, workload: Workload) -> list[Topic]:
    """A domain's own topics, or the common ones with the shares 1, 1/2, 1/3 and so on."""
    own = {f"{name}: {topic}": share for topic, share in domain.topics.items()}
    topics = own or {f"topic {rank}": 1 / rank for rank in range(1, workload.common_topics + 1)}
    total = sum(topics.values())
    return [Topic(name, topic, domain.share * share / total) for topic, share in topics.items()]
