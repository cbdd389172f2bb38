"""From what was gathered of each pass to the figures that the demo reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.routing import LOAD_POLICIES
from coterie.up.demo.client import Served
from coterie.up.demo.counters import ZERO, Counters, Sample
from coterie.up.demo.schedule import Pass

_MOST_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request went.

    Attributes:
        worker: name of the decode engine.
        band: engines among which load decided.
    """

    worker: str
    band: int


@dataclass(frozen=True, slots=True)
class PassResult:
    """What was gathered of one pass.

    Attributes:
        planned: the pass.
        served: its requests.
        routed: by request id.
        cpu_s: CPU seconds of the decode engines' processes, without threads that poll without pause.
        counted: by the decode engines; None where they do not count.
        samples: of the counters, in order of time.
        full_live: requests in a step from which on the decode engines count as fully loaded.
    """

    planned: Pass
    served: tuple[Served, ...]
    routed: Mapping[str, Routed]
    cpu_s: float
    counted: Counters | None
    samples: tuple[Sample, ...]
    full_live: float

    @property
    def at_full_load(self) -> Counters:
        """Sum of the samples at full load: without the round's beginning and end, when few requests decode."""
        counted = [sample.counted for sample in self.samples]
        return sum((one for one in counted if one.steps and one.rows >= self.full_live * one.steps), ZERO)

    @property
    def tokens(self) -> int:
        """Output tokens of the requests that did not fail."""
        return sum(served.timeline.output_tokens for served in self.served if served.timeline)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is measured of one policy on one mix; None where it could not be.

    Attributes:
        tpot_p50_ms: median time per output token.
        tpot_p99_ms: its 99th percentile.
        ttft_p50_ms: median time to first token.
        active_experts_mean: different experts that a step of a decode engine at full load read, mean over steps and MoE
            layers.
        experts_per_token: experts read, mean over the MoE layers, per token that the decode engines computed: a step's
            reads shared among its requests.
        cpu_ms_per_token: CPU time of the decode engines' processes per output token.
        live_mean: requests that a step of a decode engine at full load served, mean over steps.
    """

    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    ttft_p50_ms: float | None
    active_experts_mean: float | None
    experts_per_token: float | None
    cpu_ms_per_token: float | None
    live_mean: float | None


COMPARED = ("active_experts_mean", "experts_per_token", "cpu_ms_per_token")
FIGURES = tuple(field.name for field in fields(Figures))


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one mix.

    Attributes:
        mix: of the domains.
        policy: its name.
        figures: median over the repeats.
        low: lowest of the repeats.
        high: highest of the repeats.
        requests: sent, in all repeats.
        errors: of them, failed.
        outputs_different: requests whose tokens were not those that the same prompt had when it was first served.
        worker_shares: share of the requests that each decode engine got, of those that any policy used.
        domain_shares: for each domain, the share of its requests on the engine that got most of them; mean over
            the passes.
    """

    mix: str
    policy: str
    figures: Figures
    low: Figures
    high: Figures
    requests: int
    errors: int
    outputs_different: int
    worker_shares: Mapping[str, float]
    domain_shares: Mapping[str, float]

    @property
    def outputs_equal(self) -> bool:
        """Whether every request was answered, with the tokens that its prompt had under the other policies."""
        return not self.errors and not self.outputs_different


@dataclass(frozen=True, slots=True)
class Gain:
    """By how much a policy that looks at experts is below the best one that looks at load alone.

    Attributes:
        mix: of the domains.
        policy: the one that looks at experts.
        figure: which of `FIGURES`.
        against: the best load balancer: that of the lowest median.
        value: 1 - policy / best, median over the repeats; negative where the policy is above.
        low: lowest of the repeats.
        high: highest of the repeats.
    """

    mix: str
    policy: str
    figure: str
    against: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class DemoResult:
    """The demo's result.

    Attributes:
        model: name of the model.
        engine: kind of the engines.
        rows: for each mix, each policy.
        gains: for each mix, of each expert-aware policy, of each of `COMPARED` that was measured; none without a load
            balancer.
        first_errors: messages of the first failed requests.
        passes: all that was gathered.
        trace: what was collected.
        profile: what was fitted.
    """

    model: str
    engine: str
    rows: tuple[Row, ...]
    gains: tuple[Gain, ...]
    first_errors: tuple[str, ...]
    passes: tuple[PassResult, ...]
    trace: ActivationTrace
    profile: Profile

    @property
    def mixes(self) -> tuple[str, ...]:
        """In the order in which they were served."""
        return tuple(dict.fromkeys(row.mix for row in self.rows))

    @property
    def policies(self) -> tuple[str, ...]:
        """In the order in which they were named."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    def rows_of(self, mix: str) -> list[Row]:
        """Rows of one mix."""
        return [row for row in self.rows if row.mix == mix]


Cells = Mapping[tuple[str, str], Sequence[Sequence[PassResult]]]
"""Passes by mix and policy, and there by repeat."""


def sum_up(
    model: str, engine: str, passes: Sequence[PassResult], trace: ActivationTrace, profile: Profile
) -> DemoResult:
    """Make the figures of all passes."""
    cells = _cells(passes)
    by_repeat = {cell: [measure(some) for some in repeats] for cell, repeats in cells.items()}
    different = _different(passes)
    workers = {where.worker for one in passes for where in one.routed.values()}
    rows = tuple(
        _row(*cell, by_repeat[cell], [one for some in repeats for one in some], different, workers)
        for cell, repeats in cells.items()
    )
    errors = [f"{one.planned.name}, {s.id}: {s.error}" for one in passes for s in one.served if s.error]
    return DemoResult(
        model, engine, rows, _gains(by_repeat), tuple(errors[:_MOST_ERRORS]), tuple(passes), trace, profile
    )


def _cells(passes: Iterable[PassResult]) -> Cells:
    """In order of mixes and policies as they are first met in repeat 0, round 0."""
    cells: dict[tuple[str, str], dict[int, list[PassResult]]] = defaultdict(lambda: defaultdict(list))
    for one in passes:
        cells[one.planned.mix, one.planned.policy][one.planned.repeat].append(one)
    return {cell: list(repeats.values()) for cell, repeats in cells.items()}


def measure(passes: Sequence[PassResult]) -> Figures:
    """Figures of some passes of one policy, taken together."""
    timelines = [served.timeline for one in passes for served in one.served if served.timeline]
    tpots = [timeline.tpot_s for timeline in timelines if timeline.tpot_s is not None]
    tokens = sum(one.tokens for one in passes)
    counted = sum((one.counted for one in passes if one.counted), ZERO)
    full = sum((one.at_full_load for one in passes), ZERO)
    return Figures(
        tpot_p50_ms=_percentile_ms(tpots, 50),
        tpot_p99_ms=_percentile_ms(tpots, 99),
        ttft_p50_ms=_percentile_ms([timeline.ttft_s for timeline in timelines], 50),
        active_experts_mean=full.active / full.steps if full.steps else None,
        experts_per_token=counted.active / counted.rows if counted.rows else None,
        cpu_ms_per_token=1000 * sum(one.cpu_s for one in passes) / tokens if tokens else None,
        live_mean=full.rows / full.steps if full.steps else None,
    )


def _percentile_ms(seconds: Sequence[float], percent: int) -> float | None:
    return 1000 * float(np.percentile(seconds, percent)) if seconds else None


def _row(
    mix: str,
    policy: str,
    figures: Sequence[Figures],
    passes: Sequence[PassResult],
    different: Mapping[tuple[str, str], int],
    workers: Iterable[str],
) -> Row:
    served = [one for some in passes for one in some.served]
    routed = Counter(dict.fromkeys(workers, 0))  # also those that got nothing under this policy
    routed.update(where.worker for one in passes for where in one.routed.values())
    return Row(
        mix=mix,
        policy=policy,
        figures=_over(figures, 50),
        low=_over(figures, 0),
        high=_over(figures, 100),
        requests=len(served),
        errors=sum(one.error is not None for one in served),
        outputs_different=different[mix, policy],
        worker_shares=_shares(routed),
        domain_shares=_domain_shares(passes),
    )


def _over(repeats: Sequence[Figures], percent: int) -> Figures:
    """A percentile over the repeats, figure by figure; of those repeats that have it."""
    values = {name: [v for one in repeats if (v := getattr(one, name)) is not None] for name in FIGURES}
    return Figures(**{name: float(np.percentile(some, percent)) if some else None for name, some in values.items()})


def _different(passes: Iterable[PassResult]) -> Counter[tuple[str, str]]:
    """Requests by mix and policy whose tokens were not those that the prompt had when it was first served."""
    first: dict[str, tuple[int, ...]] = {}
    different: Counter[tuple[str, str]] = Counter()
    for one in passes:
        for served in one.served:
            if served.timeline and first.setdefault(served.prompt.where, served.tokens) != served.tokens:
                different[one.planned.mix, one.planned.policy] += 1
    return different


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {name: count / max(1, counts.total()) for name, count in sorted(counts.items())}


def _domain_shares(passes: Sequence[PassResult]) -> dict[str, float]:
    most: dict[str, list[float]] = defaultdict(list)
    for one in passes:
        engines: dict[str, Counter[str]] = defaultdict(Counter)
        for served in one.served:
            if served.id in one.routed:
                engines[served.prompt.label][one.routed[served.id].worker] += 1
        for label, counts in engines.items():
            most[label].append(max(_shares(counts).values()))
    return {label: float(np.mean(shares)) for label, shares in sorted(most.items())}


def load_balancers(policies: Sequence[str]) -> list[str]:
    """Of some policies, those that look at load alone."""
    return [policy for policy in policies if policy in LOAD_POLICIES]


def expert_aware(policies: Sequence[str]) -> list[str]:
    """Of some policies, those that go by experts: neither load balancers nor told the domain."""
    return [policy for policy in policies if policy not in (*LOAD_POLICIES, "domain")]


def _gains(cells: Mapping[tuple[str, str], Sequence[Figures]]) -> tuple[Gain, ...]:
    mixes, policies = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    balancers = load_balancers(policies)
    if not balancers:
        return ()
    aware = expert_aware(policies)
    found = (_gain(cells, balancers, *key) for key in product(mixes, aware, COMPARED))
    return tuple(gain for gain in found if gain)


def _gain(
    cells: Mapping[tuple[str, str], Sequence[Figures]], balancers: Sequence[str], mix: str, policy: str, figure: str
) -> Gain | None:
    """None where a repeat lacks the figure."""
    values = {name: [getattr(one, figure) for one in cells[mix, name]] for name in (*balancers, policy)}
    if any(value is None for some in values.values() for value in some):
        return None
    best = min(balancers, key=lambda name: float(np.median(values[name])))
    gains = 1 - np.array(values[policy]) / np.array(values[best])
    return Gain(mix, policy, figure, best, float(np.median(gains)), float(gains.min()), float(gains.max()))
