"""What the demo serves when: rounds of requests in some mixes of domains, each round under every policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.calibration.prompts import Prompt, read_prompts
from coterie.errors import ConfigError, InputError
from coterie.routing import DECODE_POLICIES

POLICIES = ("round_robin", "least_load", "power_of_two", "domain", "locality")
"""What is compared unless others of `DECODE_POLICIES` are named."""
MIXES = ("even", "skewed", "drifting")
DEFAULT_MIXES = MIXES[:2]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo does.

    Attributes:
        calibrate: prompt file for the trace.
        serve: prompt file for the requests, with labels.
        requests: sent in each round, under each policy.
        concurrency: requests in flight.
        max_tokens: output tokens of each request.
        rounds: of each mix in each repeat; each has prompts of its own.
        repeats: how often all is served, each time with other prompts; figures are medians over them.
        seed: of the choice of prompts and of the fit.
        policies: compared, of `DECODE_POLICIES`.
        mixes: served, of `MIXES`.
    """

    calibrate: Path
    serve: Path
    requests: int = 96
    concurrency: int = 96
    max_tokens: int = 20
    rounds: int = 2
    repeats: int = 1
    seed: int = 0
    policies: tuple[str, ...] = POLICIES
    mixes: tuple[str, ...] = DEFAULT_MIXES


@dataclass(frozen=True, slots=True)
class Pass:
    """One round's requests, served under one policy.

    Attributes:
        repeat: from 0.
        mix: of `MIXES`.
        round: from 0, within the repeat.
        policy: of the options' policies.
        prompts: what is asked, in order.
    """

    repeat: int
    mix: str
    round: int
    policy: str
    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        """For people, and unique."""
        return f"{self.repeat + 1}.{self.round + 1} {self.mix} {self.policy}"


Schedule = tuple[Pass, ...]


def request_id(planned: Pass, number: int) -> str:
    """Unique id of a pass's request."""
    return f"{planned.name.replace(' ', '-')}-{number}"


def draw_schedule(options: DemoOptions) -> Schedule:
    """Choose prompts, and put the passes in order.

    The policies take turns within each round, and every second round in reverse, so that what else a machine does
    meanwhile falls on all of them alike.

    Raises:
        ConfigError: a policy or a mix is unknown or named twice.
        InputError: the prompt file is not usable, or has too few prompts of a label or too few labels.
    """
    _check_names("policies", options.policies, DECODE_POLICIES)
    _check_names("mixes", options.mixes, MIXES)
    by_label: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(options.serve).prompts:
        by_label[prompt.label].append(prompt)
    if "" in by_label:
        raise InputError(f"{by_label[''][0].where}: the demo needs a label on every prompt")
    return tuple(_passes(options, by_label))


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if not names:
        raise ConfigError(f"--{what}: none is named; there are {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"--{what}: {name!r} is none of {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(f"--{what}: {name} is named twice; name each once")


def _passes(options: DemoOptions, by_label: Mapping[str, Sequence[Prompt]]) -> Iterator[Pass]:
    for repeat in range(options.repeats):
        draws = {
            mix: _draw(by_label, mix, options, np.random.default_rng([options.seed, repeat, MIXES.index(mix)]))
            for mix in options.mixes
        }
        for number in range(options.rounds):
            order = _order(options.policies, repeat * options.rounds + number)
            for mix in options.mixes:
                for policy in order:
                    yield Pass(repeat, mix, number, policy, draws[mix][number])


def _order(policies: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Of the policies in a round: two rounds have opposite orders, and each two begin with another policy."""
    first = number // 2 % len(policies)
    order = policies[first:] + policies[:first]
    return order[::-1] if number % 2 else order


def _draw(
    by_label: Mapping[str, Sequence[Prompt]], mix: str, options: DemoOptions, rng: np.random.Generator
) -> list[tuple[Prompt, ...]]:
    """Prompts of each round, none twice, in random order within each of its phases."""
    labels = [str(label) for label in rng.permutation(sorted(by_label))]
    if len(labels) < 2 and mix == "drifting":
        raise InputError(f"{options.serve}: all prompts have the label {labels[0]!r}; a mix that drifts needs two")
    phases = quotas(len(labels), mix, options.requests)
    rounds: list[list[list[Prompt]]] = [[[] for _ in phases] for _ in range(options.rounds)]
    for label, counts in zip(labels, zip(*phases, strict=True), strict=True):
        needed, given = sum(counts) * options.rounds, by_label[label]
        if needed > len(given):
            raise InputError(
                f"{options.serve}: {len(given)} prompts with the label {label!r}; the {mix} mix needs {needed} for "
                f"{options.rounds} rounds of {options.requests} requests"
            )
        chosen = iter([given[i] for i in rng.permutation(len(given))[:needed]])
        for phase, count in enumerate(counts):
            for place, prompt in enumerate(islice(chosen, count * options.rounds)):
                rounds[place % options.rounds][phase].append(prompt)
    return [tuple(some[i] for some in one for i in rng.permutation(len(some))) for one in rounds]


def quotas(labels: int, mix: str, requests: int) -> list[list[int]]:
    """How many requests have each label, in each phase of a round.

        even:     one phase, all the same share
        skewed:   one phase, share of the i-th ~ 1 / i   (Zipf)
        drifting: two phases of equal length, the first of the first two labels alone, the second of the next two; of
                  one label each where there are fewer than four

    in whole requests by largest remainder, the earlier label or phase first among equals.
    """
    phases = _weights(labels, mix)
    lengths = _apportion(np.ones(len(phases)), requests)
    return [_apportion(weights, length) for weights, length in zip(phases, lengths, strict=True)]


def _weights(labels: int, mix: str) -> npt.NDArray[np.float64]:
    """Shape: phases x labels."""
    if mix == "even":
        return np.ones((1, labels))
    if mix == "skewed":
        return 1 / np.arange(1.0, labels + 1)[None]
    at_once = min(2, labels // 2)
    return np.stack([np.arange(labels) // at_once == phase for phase in (0, 1)]).astype(np.float64)


def _apportion(weights: npt.NDArray[np.float64], total: int) -> list[int]:
    exact = total * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return [int(count) for count in counts]
