"""Everything that a trace tells about locality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from coterie.activations import ActivationTrace
from coterie.analysis.active import DecodeUse
from coterie.analysis.batches import RANDOM, ActiveExperts, Pools, active_experts
from coterie.analysis.correlation import Correlation, Indices, members_of, prefill_decode_correlation
from coterie.analysis.findings import Inspection, KindQuality, Missing, PlottedClusters, Subject
from coterie.analysis.heldout import HeldOut, hold_out, judge, report_clusters
from coterie.analysis.projection import project
from coterie.analysis.usage import DomainUse, LayerSkew, domain_use, expert_skew
from coterie.analysis.verdict import decide
from coterie.calibration import Profile
from coterie.calibration.fit import Layers, Progress, values_of
from coterie.errors import InputError, ProfileError
from coterie.quality import (
    DEFAULT_PAIRS,
    LayerSelection,
    Pairs,
    random_pairs,
    select_layers,
    signature_quality,
    within_labels,
)
from coterie.signature import COUNT_KINDS, KINDS, Kind, SignatureTransform, fit_idf

DEFAULT_CLUSTERS = 8
MOST_POINTS = 600

Found = TypeVar("Found")


class _Plan(NamedTuple):
    """How clusters are made: by a foreign profile, or fitted to one half in this way."""

    clusters: int
    kind: Kind
    layers: Layers
    foreign: Profile | None


class _Streams(NamedTuple):
    """One source of chance for each purpose, so that a part that fails changes no other."""

    correlation: np.random.Generator
    pairs: np.random.Generator
    quality: np.random.Generator
    split: np.random.Generator
    batches: np.random.Generator
    points: np.random.Generator


def inspect_trace(
    trace: ActivationTrace,
    *,
    profile: Profile | None = None,
    clusters: int | None = None,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> Inspection:
    """Measure all that a trace tells, and conclude.

    Requests whose prompt was only partly counted are left out, those without output where others have some, and those
    whose prompt was there before; `Inspection.subject` says how many.  Any other part that cannot be measured is None,
    and `missing` says why.

    Clusters are judged on requests that they were not fitted to.  Without a profile, or with one that was fitted
    to this very trace, one half of the requests is fitted (in the same way as the profile was) and the other half
    is judged.  A profile that was fitted to another trace judges all requests.

    Args:
        trace: the requests.
        profile: a profile to judge.
        clusters: number of clusters, if there is no profile; `DEFAULT_CLUSTERS` if not given.
        seed: the same seed, trace and profile give the same numbers.
        progress: see `calibration.fit`.

    Raises:
        InputError: no request is completely counted, clusters are given beside a profile, or the seed is negative.
        ProfileError: the profile is of another model geometry.
    """
    if seed < 0:
        raise InputError(f"inspect: the seed must not be negative, got {seed}")
    plan = _plan(trace, profile, clusters)
    streams = _Streams(*np.random.default_rng(seed).spawn(len(_Streams._fields)))
    subject, used = _usable(trace)
    gaps = _Gaps(progress)
    correlation = gaps.measure("correlation", lambda: _correlation(used, streams.correlation))
    pairs = random_pairs(len(used), DEFAULT_PAIRS, streams.pairs)
    quality = _quality(used, pairs, streams.quality, gaps)
    selection = gaps.measure("selection", lambda: _selection(used, plan.kind, pairs))
    held = gaps.measure("clusters", lambda: _held_out(used, plan, streams.split, progress))
    report = gaps.measure("clusters", lambda: report_clusters(held, used.labels)) if held else None
    active = gaps.measure("active", lambda: _active(used, _placements(used, held, gaps), streams.batches))
    use = gaps.measure("use", lambda: _use(used, held))
    plot = gaps.measure("plot", lambda: _plot(held, used.labels, streams.points)) if held else None
    return Inspection(
        subject=subject,
        seed=seed,
        verdict=decide(active or (), trace.geometry.experts, assigned=report.assigned if report else 0),
        correlation=correlation,
        quality=quality,
        selection=selection,
        clusters=report,
        method=None if active is None else "expected" if used.decode_ids is None else "replayed",
        active=active,
        skew=_skew(used),
        use=use,
        plot=plot,
        missing=tuple(gaps.found),
    )


class _Gaps:
    """Measures parts, and notes those that cannot be measured."""

    def __init__(self, progress: Progress) -> None:
        self.found: list[Missing] = []
        self._progress = progress

    def measure(self, part: str, how: Callable[[], Found]) -> Found | None:
        self._progress(part)
        try:
            return how()
        except InputError as error:
            self.note(part, str(error))
            return None

    def note(self, part: str, reason: str) -> None:
        self.found.append(Missing(part, reason))


# --- what to look at -----------------------------------------------------------------------------------


def _plan(trace: ActivationTrace, profile: Profile | None, clusters: int | None) -> _Plan:
    if profile is None:
        return _Plan(DEFAULT_CLUSTERS if clusters is None else clusters, "count_idf", "greedy", None)
    if clusters is not None:
        raise InputError(
            f"{clusters} clusters are asked for beside a profile of {profile.clusters}; give one of the two"
        )
    if profile.geometry != trace.geometry:
        raise ProfileError(f"the profile is of a model with {profile.geometry}, the trace of one with {trace.geometry}")
    own = profile.trace_digest == trace.digest()
    layers: Layers = "greedy" if profile.layer_choice else profile.transform.layers
    return _Plan(profile.clusters, profile.transform.kind, layers, None if own else profile)


def _usable(trace: ActivationTrace) -> tuple[Subject, ActivationTrace]:
    complete, output = trace.complete, trace.decode_covered > 0
    if not complete.any():
        raise InputError(
            f"none of the {len(trace)} prompts was completely counted; record them again on an engine that takes no "
            "KV cache from outside"
        )
    silent = complete & ~output if (complete & output).any() else np.zeros_like(complete)
    usable = np.flatnonzero(complete & ~silent)
    used = trace.select(_first_of_each(usable, trace.prompt_hashes))
    subject = Subject(
        model=trace.model,
        geometry=trace.geometry,
        digest=trace.digest(),
        requests=len(trace),
        partly_counted=int((~complete).sum()),
        without_output=int(silent.sum()),
        repeated=len(usable) - len(used),
        used=len(used),
        labels=dict(sorted(Counter(used.labels).items())),
        prompt_tokens=int(used.prefill_covered.sum()),
        output_tokens=int(used.decode_covered.sum()),
    )
    return subject, used


def _first_of_each(requests: Indices, prompts: Sequence[str]) -> Indices:
    """The first request of each prompt."""
    _, first = np.unique([prompts[i] for i in requests], return_index=True)
    return requests[np.sort(first)]


def _need_output(trace: ActivationTrace) -> None:
    if not trace.decode_covered.all():  # then all are 0: see _usable
        raise InputError("no output tokens were counted; record outputs with `coterie collect --max-tokens`")


# --- the parts -----------------------------------------------------------------------------------------


def _correlation(trace: ActivationTrace, rng: np.random.Generator) -> Correlation:
    _need_output(trace)
    return prefill_decode_correlation(trace.prefill, trace.decode, trace.labels, rng)


def _quality(
    trace: ActivationTrace, pairs: Pairs, rng: np.random.Generator, gaps: _Gaps
) -> tuple[KindQuality, ...] | None:
    kinds = [kind for kind in KINDS if kind in COUNT_KINDS or getattr(trace, kind) is not None]
    same = pairs[within_labels(trace.labels, pairs)]

    def rho(kind: Kind, stream: np.random.Generator) -> KindQuality:
        _need_output(trace)
        rows = _transform(trace, kind).apply(values_of(trace, kind))
        whole, part = (signature_quality(rows, trace.decode, some, stream) for some in (pairs, same))
        if np.isnan(whole.value):
            raise InputError(f"rho of {kind} is not defined over {len(pairs)} pairs: too few, or all equally far apart")
        return KindQuality(kind, whole, None if np.isnan(part.value) else part)

    measured = (
        gaps.measure(f"quality of {kind}", lambda: rho(kind, stream))  # noqa: B023 - called at once
        for kind, stream in zip(kinds, rng.spawn(len(kinds)), strict=True)
    )
    return tuple(one for one in measured if one) or None


def _transform(trace: ActivationTrace, kind: Kind) -> SignatureTransform:
    layers = tuple(range(trace.geometry.layers))
    return SignatureTransform(trace.geometry, layers, kind, fit_idf(trace.prefill) if kind == "count_idf" else None)


def _selection(trace: ActivationTrace, kind: Kind, pairs: Pairs) -> LayerSelection:
    _need_output(trace)
    return select_layers(_transform(trace, kind).features(values_of(trace, kind)), trace.decode, pairs)


def _held_out(trace: ActivationTrace, plan: _Plan, rng: np.random.Generator, progress: Progress) -> HeldOut:
    if plan.foreign:
        return judge(trace, plan.foreign)
    layers = plan.layers if trace.decode_covered.all() else "all"
    return hold_out(trace, plan.clusters, rng, kind=plan.kind, layers=layers, progress=progress)


def _placements(trace: ActivationTrace, held: HeldOut | None, gaps: _Gaps) -> dict[str, Pools]:
    placements: dict[str, Pools] = {RANDOM: {"all": np.arange(len(trace))}}
    domains = members_of(trace.labels)
    if len(domains) > 1:
        placements["domain"] = domains
    else:
        gaps.note("domain batches", f"{'one label' if domains else 'no labels'}: nothing to tell apart")
    if held:
        placements["cluster"] = held.pools()
    return placements


def _active(
    trace: ActivationTrace, placements: dict[str, Pools], rng: np.random.Generator
) -> tuple[ActiveExperts, ...]:
    _need_output(trace)
    use = DecodeUse(trace.decode, trace.decode_covered, trace.decode_ids)
    return active_experts(use, placements, rng)


def _skew(trace: ActivationTrace) -> tuple[LayerSkew, ...]:
    if trace.decode_covered.any():
        return expert_skew(trace.decode, trace.decode_covered)
    return expert_skew(trace.prefill, trace.prefill_covered)


def _use(trace: ActivationTrace, held: HeldOut | None) -> DomainUse:
    groups: dict[str, Indices] = members_of(trace.labels)
    if len(groups) < 2 and held:
        groups = {f"cluster {name}": members for name, members in held.pools().items() if len(members)}
    if trace.decode_covered.any():
        return domain_use(trace.decode, trace.decode_covered, groups)
    return domain_use(trace.prefill, trace.prefill_covered, groups)


def _plot(held: HeldOut, labels: tuple[str, ...], rng: np.random.Generator) -> PlottedClusters:
    shown = np.sort(rng.permutation(len(held.requests))[:MOST_POINTS])
    projection = project(held.rows[shown], held.profile.centroids)
    return PlottedClusters(projection, tuple(labels[i] for i in held.requests[shown]))
