"""What comes when: populations of requests, and the times at which they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from coterie.activations import ActivationTrace
from coterie.core import ExpertCounts, RouteRequest
from coterie.errors import ConfigError, InputError
from coterie.sim.experts import Experts, experts_of

_TIMES, _ORDER = 2, 3  # streams of chance; 0 and 1 are the routing policies' (`routing.random_stream`)
_CHUNK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """The requests that a workload draws from.

    Attributes:
        requests: each as the decode policy sees it; ids are given on arrival.
        experts: which experts each uses when it decodes.

    Raises:
        InputError: there are none, their numbers differ, or one has no tokens.
    """

    requests: tuple[RouteRequest, ...]
    experts: Experts

    def __post_init__(self) -> None:
        if not self.requests or len(self.requests) != len(self.experts):
            raise InputError(f"population: {len(self.requests)} requests, and experts of {len(self.experts)}")
        for i, request in enumerate(self.requests):
            if request.prompt_tokens < 1 or request.output_tokens < 1:
                raise InputError(
                    f"population: request {i} has {request.prompt_tokens} prompt and {request.output_tokens} output "
                    "tokens; each must be at least 1"
                )

    def __len__(self) -> int:
        return len(self.requests)


def population_of(trace: ActivationTrace, *, output_tokens: int | None = None) -> Population:
    """The requests of a recorded trace.

    A prompt is known by its hash alone: the hash stands for its text, so only prompts that are repeated whole are alike
    to prefix-aware routing and to prefix caches.

    Args:
        trace: recorded requests with outputs.
        output_tokens: length of every output; by default each has the one that was recorded.

    Raises:
        InputError: a request has no counted output token.
    """
    requests = tuple(
        RouteRequest(
            id="",
            prompt_tokens=int(trace.prefill_tokens[i]),
            output_tokens=output_tokens or int(trace.decode_tokens[i]),
            counts=ExpertCounts(
                trace.geometry, trace.prefill[i], int(trace.prefill_tokens[i]), int(trace.prefill_covered[i])
            ),
            domain=trace.labels[i] or None,
            prompt_hash=trace.prompt_hashes[i],
            prefix=trace.prompt_hashes[i].encode(),
        )
        for i in range(len(trace))
    )
    return Population(requests, experts_of(trace))


# --- arrivals ------------------------------------------------------------------------------------------------


class Traffic(Protocol):
    """When requests arrive."""

    @property
    def rate_per_s(self) -> float:
        """Mean number of requests each second."""
        ...

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Times of arrival in seconds from the start, in order; made as they are asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Stream:
    """Independent arrivals at a mean rate.

        gap ~ Gamma(shape = burstiness, mean = 1 / rate)

    With burstiness 1 this is a Poisson process.  Below 1 arrivals come in bursts (the gaps' coefficient of variation is
    1 / sqrt(burstiness)), above 1 more evenly: the meaning of the same flag of vLLM's serving benchmark.

    Attributes:
        rate_per_s: mean number of requests each second.
        duration_s: seconds after which no more arrive.
        burstiness: shape of the gaps.

    Raises:
        ConfigError: a value is not finite or not above zero.
    """

    rate_per_s: float
    duration_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "duration_s", "burstiness"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"traffic: {name} must be above zero, got {value}")

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """See `Traffic.times_s`."""
        now_s = 0.0
        while True:
            for gap_s in rng.gamma(self.burstiness, 1 / (self.rate_per_s * self.burstiness), _CHUNK).tolist():
                now_s += gap_s
                if now_s >= self.duration_s:
                    return
                yield now_s


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """Arrivals at given times, such as those of a log.

    Attributes:
        seconds: from the start, in order; at least one.

    Raises:
        ConfigError: none, one that is negative or not finite, or one before its predecessor.
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("traffic: no arrival times")
        last_s = 0.0
        for i, time_s in enumerate(self.seconds):
            if not (math.isfinite(time_s) and time_s >= last_s):
                raise ConfigError(f"traffic: arrival {i} at {time_s} s; times must be finite, in order and from 0 on")
            last_s = time_s

    @property
    def rate_per_s(self) -> float:
        """Requests over the time of the last one; infinite where all come at once at the start."""
        return len(self.seconds) / self.seconds[-1] if self.seconds[-1] else math.inf

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """See `Traffic.times_s`."""
        return iter(self.seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request comes in.

    Attributes:
        time_s: when.
        number: how many came before it.
        position: which of the population it is.
        request: what it asks, under an id of its own.
    """

    time_s: float
    number: int
    position: int
    request: RouteRequest


def arrivals(population: Population, traffic: Traffic, seed: int) -> Iterator[Arrival]:
    """Draw a workload: in random order, each request of the population once before any comes again.

    Times and order have streams of chance of their own, so every policy meets the same requests at the same times, and
    another rate brings the same requests in the same order.
    """
    times = traffic.times_s(np.random.default_rng([seed, _TIMES]))
    order = _passes(len(population), np.random.default_rng([seed, _ORDER]))
    for number, (time_s, position) in enumerate(zip(times, order, strict=False)):
        request = replace(population.requests[position], id=str(number))
        yield Arrival(time_s, number, position, request)


def _passes(size: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        order: Sequence[int] = rng.permutation(size).tolist()
        yield from order
