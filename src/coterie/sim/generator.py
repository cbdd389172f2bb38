"""Made-up requests: expert probabilities with as much locality as published statistics say there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.core import Counts, ExpertCounts, ModelGeometry, RouteRequest, prompt_hash
from coterie.errors import InputError
from coterie.sim.choices import Probabilities, draw_counts, marginals
from coterie.sim.experts import ExpectedExperts
from coterie.sim.workload import Population


@dataclass(frozen=True, slots=True)
class Spread:
    """How much each part of a routing logit varies: standard deviations.

        logit[request, phase, l, e] = shared[l, e] + domain[d, l, e] + topic[t, l, e]
                                      + request[i, l, e] + phase[i, phase, l, e]

    All parts are normal and independent of one another, of layers and of experts.

    Attributes:
        shared: what all requests like: some experts are busier than others.
        domain: what the requests of a domain like.
        topic: what the requests of a topic like, whatever their domain.
        request: what one request likes, in prefill and decode alike.
        phase: what one request likes in prefill alone, and another time in decode alone.

    Raises:
        InputError: a value is negative or not finite.
    """

    shared: float
    domain: float
    topic: float
    request: float
    phase: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and value >= 0):
                raise InputError(f"spread: {field.name} must be finite and not negative, got {value}")


@dataclass(frozen=True, slots=True)
class Topic:
    """Requests that are alike.

    Attributes:
        domain: the label that they have.
        name: topics of one name like the same experts, in whatever domains they are.
        share: of all requests, before it is divided by the sum of all shares.
    """

    domain: str
    name: str
    share: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths: log-normal, rounded, and cut off at both ends.

    Attributes:
        median: tokens.
        sigma: standard deviation of the logarithm.
        least: tokens of the shortest.
        most: tokens of the longest.
    """

    median: float
    sigma: float
    least: int = 4
    most: int = 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a workload is made of.

    Attributes:
        spread: of the routing logits.
        topics: what requests are about.
        prompts: how long they are.

    Raises:
        InputError: no topic, or a share is not above zero.
    """

    spread: Spread
    topics: tuple[Topic, ...]
    prompts: Lengths

    def __post_init__(self) -> None:
        if not self.topics:
            raise InputError("recipe: no topics")
        for topic in self.topics:
            if not (np.isfinite(topic.share) and topic.share > 0):
                raise InputError(f"recipe: the share of {topic.domain}/{topic.name} must be above 0, got {topic.share}")

    def mixed(self, domains: Mapping[str, float]) -> Recipe:
        """The recipe with other shares of its domains; topics keep their shares of their domain.

        Args:
            domains: share of each domain; those that are left out have none.

        Raises:
            InputError: a domain is not in the recipe, or a share is not above zero.
        """
        totals: dict[str, float] = {}
        for topic in self.topics:
            totals[topic.domain] = totals.get(topic.domain, 0.0) + topic.share
        if unknown := set(domains) - set(totals):
            raise InputError(f"mix: no domain {min(unknown)!r}; there are {', '.join(sorted(totals))}")
        topics = tuple(
            Topic(topic.domain, topic.name, topic.share / totals[topic.domain] * domains[topic.domain])
            for topic in self.topics
            if topic.domain in domains
        )
        return Recipe(self.spread, topics, self.prompts)


class _Part(IntEnum):
    """Streams of chance, one for each part of a request."""

    SHARED = 0
    DOMAIN = 1
    TOPIC = 2
    CHOICE = 3
    LENGTH = 4
    REQUEST = 5
    PREFILL = 6
    DECODE = 7
    PROMPT_COUNTS = 8
    OUTPUT_COUNTS = 9


@dataclass(frozen=True, slots=True, eq=False)
class MadeRequests:
    """Requests that were drawn.

    Attributes:
        geometry: of the model.
        labels: domain of each.
        prompt_tokens: `[N]`.
        prefill: `[N, L, E]` probabilities of a prompt token.
        decode: `[N, L, E]` probabilities of an output token.
        prompt_hashes: identity of each.
        prompt_counts: `[N, L, E]` experts of the prompt's tokens, drawn from `prefill`.
        seed: what they were drawn with.
        sample: which sample of that seed they are.
    """

    geometry: ModelGeometry
    labels: tuple[str, ...]
    prompt_tokens: npt.NDArray[np.int64]
    prefill: Probabilities
    decode: Probabilities
    prompt_hashes: tuple[str, ...]
    prompt_counts: Counts
    seed: int
    sample: int

    def __len__(self) -> int:
        return len(self.labels)

    def population(self, output_tokens: int) -> Population:
        """The requests as a workload, each with so many output tokens."""
        requests = tuple(
            RouteRequest(
                id="",
                prompt_tokens=int(self.prompt_tokens[i]),
                output_tokens=output_tokens,
                counts=ExpertCounts(
                    self.geometry, self.prompt_counts[i], int(self.prompt_tokens[i]), int(self.prompt_tokens[i])
                ),
                domain=self.labels[i],
                prompt_hash=self.prompt_hashes[i],
                prefix=self.prompt_hashes[i].encode(),
            )
            for i in range(len(self))
        )
        return Population(requests, ExpectedExperts(self.decode, self.geometry))

    def trace(self, model: str, output_tokens: int) -> ActivationTrace:
        """The requests as if they had been recorded, with outputs of so many tokens.

        Args:
            model: its name.
            output_tokens: at least 2; the last is sampled and never forwarded, so it is not counted.
        """
        covered = np.full(len(self), output_tokens - 1, dtype=np.int64)
        rng = _stream(self.seed, _Part.OUTPUT_COUNTS, self.sample)
        return ActivationTrace(
            model,
            self.geometry,
            prefill=self.prompt_counts,
            decode=draw_counts(self.decode, covered, rng),
            prefill_tokens=self.prompt_tokens,
            prefill_covered=self.prompt_tokens,
            decode_tokens=covered + 1,
            decode_covered=covered,
            prompt_hashes=self.prompt_hashes,
            labels=self.labels,
        )


def make_requests(
    recipe: Recipe, geometry: ModelGeometry, requests: int, *, seed: int, sample: int = 0
) -> MadeRequests:
    """Draw requests.

    What domains and topics like is drawn from the seed alone, so that samples of one seed are of one model: one sample
    to calibrate with, another to serve.  Each part has a stream of chance of its own; what a domain or topic likes also
    hangs on its name, so another mix changes nothing of it.

    Args:
        recipe: what they are made of.
        geometry: of the model; top-k must be less than its experts.
        requests: how many, N.
        seed: of all that is drawn.
        sample: which sample; samples have no request in common.

    Raises:
        InputError: the geometry leaves no choice, or there are to be no requests.
    """
    if geometry.top_k >= geometry.experts or requests < 1:
        raise InputError(f"generator: {requests} requests, {geometry}: need a request, and fewer than all experts")
    shape, spread = (geometry.layers, geometry.experts), recipe.spread
    shares = np.array([topic.share for topic in recipe.topics])
    chosen = _stream(seed, _Part.CHOICE, sample).choice(len(shares), requests, p=shares / shares.sum())
    of_topics = spread.shared * _stream(seed, _Part.SHARED).standard_normal(shape) + np.stack(
        [
            spread.domain * _named(seed, _Part.DOMAIN, topic.domain).standard_normal(shape)
            + spread.topic * _named(seed, _Part.TOPIC, topic.name).standard_normal(shape)
            for topic in recipe.topics
        ]
    )

    def noise(part: _Part, scale: float) -> Probabilities:
        return scale * _stream(seed, part, sample).standard_normal((requests, *shape), dtype=np.float32)

    likings = of_topics.astype(np.float32)[chosen] + noise(_Part.REQUEST, spread.request)
    prefill = marginals(likings + noise(_Part.PREFILL, spread.phase), geometry.top_k)
    tokens = _draw_lengths(recipe.prompts, requests, _stream(seed, _Part.LENGTH, sample))
    return MadeRequests(
        geometry,
        labels=tuple(recipe.topics[t].domain for t in chosen),
        prompt_tokens=tokens,
        prefill=prefill,
        decode=marginals(likings + noise(_Part.DECODE, spread.phase), geometry.top_k),
        prompt_hashes=tuple(prompt_hash(f"made {seed} {sample} {i}") for i in range(requests)),
        prompt_counts=draw_counts(prefill, tokens, _stream(seed, _Part.PROMPT_COUNTS, sample)),
        seed=seed,
        sample=sample,
    )


def _stream(seed: int, part: _Part, sample: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, part, sample])


def _named(seed: int, part: _Part, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, part, *name.encode()])


def _draw_lengths(lengths: Lengths, requests: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    drawn = np.rint(lengths.median * np.exp(lengths.sigma * rng.standard_normal(requests)))
    return np.clip(drawn, lengths.least, lengths.most).astype(np.int64)


# --- workloads -----------------------------------------------------------------------------------------------------

WorkloadName = Literal["task", "language"]

_SKETCH = Spread(shared=1.0, domain=1.4, topic=0.6, request=0.4, phase=0.3)


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A made-up workload.

    Attributes:
        population: what to serve.
        calibration: other requests of the same model, labelled and with outputs, to fit profiles to.
    """

    population: Population
    calibration: ActivationTrace


def sketch(workload: WorkloadName, *, seed: int = 0, requests: int = 1500, calibration: int = 1000) -> Made:
    """Qwen3-30B-A3B's geometry with 6 of its 48 layers, and domains in the shares of ELDR section 1.4.

    Args:
        workload: `task` or `language`.
        seed: of all that is drawn.
        requests: to serve.
        calibration: to fit profiles to.
    """
    recipe, geometry = _RECIPES[workload], ModelGeometry(6, 128, 8)
    served = make_requests(recipe, geometry, requests, seed=seed)
    fitted = make_requests(recipe, geometry, calibration, seed=seed, sample=1)
    return Made(served.population(512), fitted.trace(f"made-up {workload}", 512))


def _topics(domains: Mapping[str, float], *, each: int, crossed: bool) -> tuple[Topic, ...]:
    return tuple(
        Topic(domain, f"topic {i}" if crossed else f"{domain} {i}", share / each)
        for domain, share in domains.items()
        for i in range(each)
    )


_RECIPES: Mapping[WorkloadName, Recipe] = {
    "task": Recipe(
        _SKETCH,
        _topics({"legal": 3600, "code": 2779, "math": 2744, "medical": 2545}, each=4, crossed=False),
        Lengths(150, 0.8),
    ),
    "language": Recipe(
        Spread(shared=1.0, domain=0.7, topic=0.6, request=0.4, phase=0.3),
        _topics(
            {"en": 47.6, "zh": 27.8, "ru": 9.2, "fr": 2.4, "pt": 2.1, "es": 1.8, "other": 9.2}, each=12, crossed=True
        ),
        Lengths(80, 1.1),
    ),
}
