"""What the demo serves when: rounds of requests in two mixes of domains, each round under every policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.calibration.prompts import Prompt, read_prompts
from coterie.errors import InputError

POLICIES = ("round_robin", "least_load", "power_of_two", "domain", "locality")
BALANCERS = POLICIES[:3]
"""Policies that look at load alone; what locality is compared with."""
MIXES = ("even", "skewed")


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
    """

    calibrate: Path
    serve: Path
    requests: int = 96
    concurrency: int = 96
    max_tokens: int = 20
    rounds: int = 2
    repeats: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """One round's requests, served under one policy.

    Attributes:
        repeat: from 0.
        mix: of `MIXES`.
        round: from 0, within the repeat.
        policy: of `POLICIES`.
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
        InputError: the prompt file is not usable, or has too few prompts of a label.
    """
    by_label: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(options.serve).prompts:
        by_label[prompt.label].append(prompt)
    if "" in by_label:
        raise InputError(f"{by_label[''][0].where}: the demo needs a label on every prompt")
    return tuple(_passes(options, by_label))


def _passes(options: DemoOptions, by_label: Mapping[str, Sequence[Prompt]]) -> Iterator[Pass]:
    for repeat in range(options.repeats):
        draws = {
            mix: _draw(by_label, mix, options, np.random.default_rng([options.seed, repeat, m]))
            for m, mix in enumerate(MIXES)
        }
        for number in range(options.rounds):
            order = _order(repeat * options.rounds + number)
            for mix in MIXES:
                for policy in order:
                    yield Pass(repeat, mix, number, policy, draws[mix][number])


def _order(number: int) -> tuple[str, ...]:
    """Of the policies in a round: two rounds have opposite orders, and each two begin with another policy."""
    first = number // 2 % len(POLICIES)
    order = POLICIES[first:] + POLICIES[:first]
    return order[::-1] if number % 2 else order


def _draw(
    by_label: Mapping[str, Sequence[Prompt]], mix: str, options: DemoOptions, rng: np.random.Generator
) -> list[tuple[Prompt, ...]]:
    """Prompts of each round, none twice, in random order."""
    labels = [str(label) for label in rng.permutation(sorted(by_label))]
    counts = quotas(len(labels), mix, options.requests)
    rounds: list[list[Prompt]] = [[] for _ in range(options.rounds)]
    for label, count in zip(labels, counts, strict=True):
        needed, given = count * options.rounds, by_label[label]
        if needed > len(given):
            raise InputError(
                f"{options.serve}: {len(given)} prompts with the label {label!r}; the {mix} mix needs {needed} for "
                f"{options.rounds} rounds of {options.requests} requests"
            )
        chosen = rng.permutation(len(given))[:needed]
        for place, i in enumerate(chosen):
            rounds[place % options.rounds].append(given[i])
    return [tuple(one[i] for i in rng.permutation(len(one))) for one in rounds]


def quotas(labels: int, mix: str, requests: int) -> list[int]:
    """How many requests of a round have each label.

        even:   all the same share
        skewed: share of the i-th ~ 1 / i   (Zipf)

    in whole requests by largest remainder, the earlier label first among equals.
    """
    weights = np.ones(labels) if mix == "even" else 1 / np.arange(1, labels + 1)
    exact = requests * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: requests - int(counts.sum())]
    counts[largest] += 1
    return [int(count) for count in counts]
