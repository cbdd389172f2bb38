"""Made-up requests: expert probabilities with as much locality as published statistics say there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.core import Counts, ModelGeometry, prompt_hash
from coterie.errors import InputError
from coterie.sim.choices import draw_counts, marginals


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
        output_tokens: of every request; the last one is sampled and never forwarded, so it has no experts.
        repeat: tokens of a text that choose alike: the counts of T tokens scatter as those of T / repeat would.  Words
            come again in a text, and a token's experts hang most on the token.

    Raises:
        InputError: no topic, a share is not above zero, fewer than 2 output tokens, or `repeat` is below 1.
    """

    spread: Spread
    topics: tuple[Topic, ...]
    prompts: Lengths
    output_tokens: int = 512
    repeat: float = 1.0

    def __post_init__(self) -> None:
        if not self.topics:
            raise InputError("recipe: no topics")
        if self.output_tokens < 2 or not (np.isfinite(self.repeat) and self.repeat >= 1):
            raise InputError(
                f"recipe: {self.output_tokens} output tokens (2 or more), repeat {self.repeat} (1 or more)"
            )
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
        return replace(self, topics=topics)


class _Part(IntEnum):
    """Streams of chance, one for each part of a request."""

    SHARED = 0
    DOMAIN = 1
    TOPIC = 2
    CHOICE = 3
    LENGTH = 4
    REQUEST = 5
    PREFILL = 6
    PREFILL_COUNTS = 7  # of a phase and of its counts: one follows the other
    DECODE = 8
    DECODE_COUNTS = 9


def make_trace(
    recipe: Recipe, geometry: ModelGeometry, requests: int, *, seed: int, sample: int = 0, model: str = "made-up"
) -> ActivationTrace:
    """Draw requests with their outputs, as if they had been recorded.

    What domains and topics like is drawn from the seed alone, so that samples of one seed are of one model: one sample
    to calibrate with, another to serve.  Each part has a stream of chance of its own; what a domain or topic likes also
    hangs on its name, so another mix changes nothing of it.

    Args:
        recipe: what they are made of.
        geometry: of the model; top-k must be less than its experts.
        requests: how many, N.
        seed: of all that is drawn.
        sample: which sample; samples have no request in common.
        model: name of the model.

    Returns:
        A trace with labels and no token ids: `population_of` makes a workload of it with expected active experts.

    Raises:
        InputError: the geometry leaves no choice, or there are to be no requests.
    """
    if geometry.top_k >= geometry.experts or requests < 1:
        raise InputError(f"generator: {requests} requests, {geometry}: need a request, and fewer than all experts")
    shares = np.array([topic.share for topic in recipe.topics])
    chosen = _stream(seed, _Part.CHOICE, sample).choice(len(shares), requests, p=shares / shares.sum())
    tokens = _draw_lengths(recipe.prompts, requests, _stream(seed, _Part.LENGTH, sample))
    covered = np.full(requests, recipe.output_tokens - 1, dtype=np.int64)
    own = _Own(recipe, geometry, seed, sample, _likings(recipe, geometry, seed)[chosen])
    return ActivationTrace(
        model,
        geometry,
        prefill=own.counts(_Part.PREFILL, tokens),
        decode=own.counts(_Part.DECODE, covered),
        prefill_tokens=tokens,
        prefill_covered=tokens,
        decode_tokens=covered + 1,
        decode_covered=covered,
        prompt_hashes=tuple(prompt_hash(f"made {seed} {sample} {i}") for i in range(requests)),
        labels=tuple(recipe.topics[t].domain for t in chosen),
    )


def _likings(recipe: Recipe, geometry: ModelGeometry, seed: int) -> npt.NDArray[np.float32]:
    """`[topics, L, E]` logits that the requests of each topic have in common."""
    spread, shape = recipe.spread, (geometry.layers, geometry.experts)
    shared = spread.shared * _stream(seed, _Part.SHARED).standard_normal(shape)
    found = [
        shared
        + spread.domain * _named(seed, _Part.DOMAIN, topic.domain).standard_normal(shape)
        + spread.topic * _named(seed, _Part.TOPIC, topic.name).standard_normal(shape)
        for topic in recipe.topics
    ]
    return np.array(found, dtype=np.float32)


class _Own:
    """What is each request's own, and what its tokens choose."""

    def __init__(
        self, recipe: Recipe, geometry: ModelGeometry, seed: int, sample: int, common: npt.NDArray[np.float32]
    ) -> None:
        self._recipe, self._geometry, self._seed, self._sample = recipe, geometry, seed, sample
        self._logits = common + self._noise(_Part.REQUEST, recipe.spread.request, common.shape)

    def _noise(self, part: _Part, scale: float, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        normal = _stream(self._seed, part, self._sample).standard_normal(shape, dtype=np.float32)
        return np.float32(scale) * normal

    def counts(self, phase: _Part, tokens: npt.NDArray[np.int64]) -> Counts:
        """`[N, L, E]` counts of so many tokens in this phase."""
        logits = self._logits + self._noise(phase, self._recipe.spread.phase, self._logits.shape)
        rng = _stream(self._seed, _Part(phase + 1), self._sample)
        return draw_counts(marginals(logits, self._geometry.top_k), tokens, rng, repeat=self._recipe.repeat)


def _stream(seed: int, part: _Part, sample: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, part, sample])


def _named(seed: int, part: _Part, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, part, *name.encode()])


def _draw_lengths(lengths: Lengths, requests: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    drawn = np.rint(lengths.median * np.exp(lengths.sigma * rng.standard_normal(requests)))
    return np.clip(drawn, lengths.least, lengths.most).astype(np.int64)
