"""What comes when: populations of requests, and the times at which they arrive."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from coterie.activations import ActivationTrace
from coterie.core import ExpertCounts, RouteRequest
from coterie.errors import ConfigError, InputError
from coterie.files import read_text
from coterie.sim.experts import Experts, experts_of

_TIMES, _ORDER, _MIX = 2, 3, 4  # streams of chance; 0 and 1 are the routing policies' (`routing.random_stream`)
_CHUNK = 1024
_MOST_ARRIVALS_BYTES = 256 << 20


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


def read_arrivals(path: str | os.PathLike[str]) -> RecordedTimes:
    """Read times of arrival from a text file: one in seconds on each line, in order; the first counts as 0.

    Raises:
        ConfigError: the file cannot be read, has no line or one that is no such time.
    """
    lines = read_text(path, _MOST_ARRIVALS_BYTES).splitlines()
    times_s = [_time_of(path, number, line) for number, line in enumerate(lines, start=1)]
    if not times_s:
        raise ConfigError(f"{path}: no line with a time")
    for number, (before_s, time_s) in enumerate(pairwise(times_s), start=2):
        if time_s < before_s:
            raise ConfigError(f"{path}: line {number}: {time_s:g} s comes before the line above it; sort the file")
    return RecordedTimes(tuple(time_s - times_s[0] for time_s in times_s))


def _time_of(path: str | os.PathLike[str], number: int, line: str) -> float:
    try:
        time_s = float(line)
    except ValueError:
        time_s = math.nan
    if not math.isfinite(time_s):
        raise ConfigError(f"{path}: line {number}: {line[:100]!r} is no time in seconds")
    return time_s


# --- what arrives --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each domain is asked from.

    Attributes:
        weights: a domain and its weight; a domain's share is its weight over their sum.

    Raises:
        ConfigError: a weight is negative or not finite, all are zero, or a domain comes twice.
    """

    weights: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        for domain, weight in self.weights:
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"mix: the weight of {domain!r} must be finite and not negative, got {weight}")
        if not any(weight for _, weight in self.weights):
            raise ConfigError("mix: no domain has a weight above zero")
        names = self.domains
        if len(set(names)) < len(names):
            raise ConfigError(f"mix: {next(name for name in names if names.count(name) > 1)!r} comes twice")

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains."""
        return tuple(domain for domain, _ in self.weights)

    def draw(self, chance: float) -> str:
        """The domain at a point of the unit interval, in proportion to the weights.

        Args:
            chance: from 0 to below 1, uniformly drawn.
        """
        bounds = list(accumulate(weight for _, weight in self.weights))
        return self.weights[min(bisect_right(bounds, chance * bounds[-1]), len(bounds) - 1)][0]


@dataclass(frozen=True, slots=True)
class Drift:
    """A mix that changes: each holds from its time until that of the next.

    Attributes:
        pieces: a time in seconds, and the mix from then on; the first is of time 0.

    Raises:
        ConfigError: none is of time 0, or the times are not finite and ascending.
    """

    pieces: tuple[tuple[float, Mix], ...]

    def __post_init__(self) -> None:
        times = self.times_s
        if not times or times[0] != 0:
            raise ConfigError("drift: the first mix must be that of time 0")
        if list(times) != sorted(set(times)) or not math.isfinite(times[-1]):
            raise ConfigError(f"drift: times must be finite and ascending, got {times}")

    @property
    def times_s(self) -> tuple[float, ...]:
        """When each mix begins."""
        return tuple(time_s for time_s, _ in self.pieces)

    def at(self, time_s: float) -> Mix:
        """The mix of a moment, from 0 on."""
        return self.pieces[bisect_right(self.times_s, time_s) - 1][1]


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


def arrivals(population: Population, traffic: Traffic, seed: int, drift: Drift | None = None) -> Iterator[Arrival]:
    """Draw a workload: in random order, each request once before any comes again.

    With a drift, the domain of each arrival is drawn from the mix of its time, and within the domain each request comes
    once before any comes again.

    Times, domains and orders have streams of chance of their own, so every policy meets the same requests at the same
    times; another rate brings the same requests in the same order, and another mix those of each domain.

    Raises:
        ConfigError: the population has no request of a domain of the drift.
    """
    times = traffic.times_s(np.random.default_rng([seed, _TIMES]))
    position = _anyone(population, seed) if drift is None else _by_domain(population, drift, seed)
    return (
        Arrival(time_s, number, place := position(time_s), replace(population.requests[place], id=str(number)))
        for number, time_s in enumerate(times)
    )


def _anyone(population: Population, seed: int) -> Callable[[float], int]:
    order = _passes(range(len(population)), np.random.default_rng([seed, _ORDER]))
    return lambda time_s: next(order)


def _by_domain(population: Population, drift: Drift, seed: int) -> Callable[[float], int]:
    orders = _orders(population, seed)
    for domain in dict.fromkeys(domain for _, mix in drift.pieces for domain in mix.domains):
        if domain not in orders:
            raise ConfigError(
                f"mix: no request is of {domain!r}; there are {', '.join(sorted(orders)) or 'no domains'}"
            )
    chances = _uniform(np.random.default_rng([seed, _MIX]))
    return lambda time_s: next(orders[drift.at(time_s).draw(next(chances))])


def _orders(population: Population, seed: int) -> dict[str, Iterator[int]]:
    """Positions of each domain's requests, in the order in which they come."""
    members: dict[str, list[int]] = {}
    for i, request in enumerate(population.requests):
        if request.domain is not None:
            members.setdefault(request.domain, []).append(i)
    return {
        domain: _passes(members[domain], np.random.default_rng([seed, _ORDER, k]))
        for k, domain in enumerate(sorted(members))
    }


def _passes(positions: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from (positions[i] for i in rng.permutation(len(positions)).tolist())


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(_CHUNK).tolist()
