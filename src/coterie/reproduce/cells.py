"""One workload on one model, simulated as the paper measured it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from coterie.calibration import Profile, fit
from coterie.calibration.fit import make_profile, signatures_of
from coterie.clustering import kmeans
from coterie.routing import DEFAULT_TAU, LOAD_POLICIES, make_policy
from coterie.signature import Kind
from coterie.sim import ClusterSpec, Row, Stream, simulate
from coterie.sim.made import Made, made_workload
from coterie.sim.placement import placements_of
from coterie.sim.spec import parse_topology

Metric = Literal["tpot_p50", "tpot_p99", "active_experts"]
Tell = Callable[[str], None]

BALANCERS = "balancers"
"""Stands for the best of the load balancers at each rate, as in the paper's tables."""

RATES = (20.0, 40.0, 60.0, 80.0, 100.0)

_FIELDS = {"tpot_p50": "tpot_p50_ms", "tpot_p99": "tpot_p99_ms", "active_experts": "active_experts_mean"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How everything is simulated.

    Attributes:
        measured_s: for how long requests arrive that count; ELDR section 1.4 has 120 s.
        warm_up_s: for how long they arrive before.
        seed: of all that is drawn: models, requests, arrivals and clusters.
        requests: different ones to serve; they come again when all have come.
        calibration: others, to fit profiles to; as many as in the paper.
    """

    measured_s: float = 120.0
    warm_up_s: float = 30.0
    seed: int = 0
    requests: int = 1500
    calibration: int = 1000


@dataclass(frozen=True, slots=True)
class Setup:
    """One run.

    Attributes:
        policy: for decode workers.
        rate: requests each second.
        topology: prefill and decode workers.
        tau: width of the locality band.
        kind: of the profile's signatures.
        balanced: whether the profile's clusters are of equal size.
        cache_tokens: of each prefill worker's prefix cache.
        expert_ranks: over which each decode worker spreads its experts.
        placed: whether it spreads them by the use of the requests that its centroid attracts.
    """

    policy: str
    rate: float
    topology: str = "8P16D"
    tau: float = DEFAULT_TAU
    kind: Kind = "count_idf"
    balanced: bool = True
    cache_tokens: int = 0
    expert_ranks: int = 1
    placed: bool = False


class Cell:
    """One workload on one model.  What was made, fitted or run once is not again.

    Args:
        workload: `task` or `language`.
        model: a key of `Published.models`.
        plan: how it is simulated.
        tell: is told what is done next.
    """

    def __init__(self, workload: str, model: str, plan: Plan, tell: Tell) -> None:
        self.workload, self.model = workload, model
        self._plan, self._tell = plan, tell
        self._made: Made | None = None
        self._profiles: dict[tuple[Kind, int, bool], Profile] = {}
        self._rows: dict[Setup, Row] = {}

    def run(self, setup: Setup) -> Row:
        """Figures of one run."""
        if setup not in self._rows:
            self._tell(f"{self.workload}, {self.model}: {setup.policy} at {setup.rate:g} requests/s")
            self._rows[setup] = self._simulate(setup)
        return self._rows[setup]

    def change(self, setup: Setup, against: str, metric: Metric) -> float:
        """By how many per cent a figure differs from that of another policy in the same setup, or of `BALANCERS`.

        Only what routes by centroids can place experts by them.
        """
        rivals = LOAD_POLICIES if against == BALANCERS else (against,)
        lowest = min(self._figure(replace(setup, policy=name, placed=False), metric) for name in rivals)
        return 100 * (self._figure(setup, metric) / lowest - 1)

    def mean_change(self, setup: Setup, against: str, metric: Metric, rates: Sequence[float] = RATES) -> float:
        """The mean of `change` over rates, by default the paper's five."""
        return float(np.mean([self.change(replace(setup, rate=rate), against, metric) for rate in rates]))

    def _figure(self, setup: Setup, metric: Metric) -> float:
        value = getattr(self.run(setup), _FIELDS[metric])
        assert isinstance(value, float), setup
        return value

    def _simulate(self, setup: Setup) -> Row:
        made, plan, spec = self._make(), self._plan, self._spec(setup)
        needed = "locality" in setup.policy
        decode = make_policy(
            setup.policy,
            spec.targets("decode"),
            profile=self._profile(setup.kind, spec.decode, setup.balanced) if needed else None,
            trace=made.calibration,
            tau=setup.tau,
        )
        return simulate(
            made.population,
            Stream(setup.rate, plan.warm_up_s + plan.measured_s),
            spec,
            prefill=make_policy("prefix", spec.targets("prefill")),
            decode=decode,
            seed=plan.seed,
            warm_up_s=plan.warm_up_s,
        )

    def _spec(self, setup: Setup) -> ClusterSpec:
        made, topology = self._make(), parse_topology(setup.topology)
        spec = ClusterSpec(
            topology.prefill,
            topology.decode,
            topology.ranks,
            setup.expert_ranks,
            step_time=made.step_time,
            cache_tokens=setup.cache_tokens,
            prefill_first=True,
        )
        if not setup.placed:
            return spec
        profile = self._profile(setup.kind, spec.decode, setup.balanced)
        return replace(spec, placements=placements_of(profile, made.calibration, spec.holders))

    def _make(self) -> Made:
        if self._made is None:
            self._tell(f"{self.workload}, {self.model}: making requests up")
            plan = self._plan
            self._made = made_workload(
                self.workload, self.model, seed=plan.seed, requests=plan.requests, calibration=plan.calibration
            )
        return self._made

    def _profile(self, kind: Kind, clusters: int, balanced: bool) -> Profile:
        key = (kind, clusters, balanced)
        if key not in self._profiles:
            self._tell(f"{self.workload}, {self.model}: fitting a profile")
            make = partial(fit, self._make().calibration, clusters, seed=self._plan.seed, kind=kind)
            self._profiles[key] = make() if balanced else self._unbalanced(kind, clusters)
        return self._profiles[key]

    def _unbalanced(self, kind: Kind, clusters: int) -> Profile:
        """The balanced profile's signatures, clustered without the bound."""
        trace, transform = self._make().calibration, self._profile(kind, clusters, True).transform
        rng = np.random.default_rng(self._plan.seed)
        return make_profile(
            trace, transform, kmeans(signatures_of(trace, transform), clusters, rng), seed=self._plan.seed
        )
