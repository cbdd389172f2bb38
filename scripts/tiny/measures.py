"""What a trace says about a model's routing: the figures of the model card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.activations import ActivationTrace
from coterie.analysis.active import DecodeUse
from coterie.analysis.batches import RANDOM, ActiveExperts, active_experts
from coterie.analysis.correlation import members_of, prefill_decode_correlation
from coterie.analysis.heldout import hold_out, report_clusters
from coterie.analysis.usage import expert_skew
from coterie.quality import DEFAULT_PAIRS, cosines, random_pairs, spearman, unit_rows
from coterie.signature import Kind, SignatureTransform, fit_idf
from tiny.sources import DOMAINS, LANGUAGES, TASKS

BATCH = 32
CLUSTERS = 8
DRAWS = 800
SPLITS = 5
KINDS: tuple[Kind, ...] = ("count", "count_idf", "binary")


@dataclass(frozen=True, slots=True)
class Locality:
    """Batches of `BATCH` requests of one domain, against batches of all the domains named.

    Attributes:
        same: active experts per layer and step in batches of one domain, mean over domains.
        mixed: the same in mixed batches.
        reduction: 1 - same / mixed.
    """

    same: float
    mixed: float
    reduction: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of one trace.

    Attributes:
        tasks, languages, everything: batches of one domain against mixed ones.
        by_domain: active experts per layer and step of each domain's batches.
        purity: of `CLUSTERS` balanced clusters, fitted to one half of the requests and judged on the other; mean over
            `SPLITS` divisions.
        purity_least: the least of these.
        own, other: mean Pearson r between a prompt's counts and its own output's, and another request's.
        rho: Spearman correlation of signature and decode similarity over pairs of requests, by kind of signature.
        load: use of the most used expert over the mean, mean over layers.
        unused: experts, of all layers, that no output token chose.
    """

    tasks: Locality
    languages: Locality
    everything: Locality
    by_domain: dict[str, float]
    purity: float
    purity_least: float
    own: float
    other: float
    rho: dict[str, float]
    load: float
    unused: int


def measure(trace: ActivationTrace, seed: int = 0) -> Statistics:
    """All figures of a trace that has the labels `DOMAINS`."""
    rng = np.random.default_rng(seed)
    whole = _compare(trace, DOMAINS, rng)
    purities = [purity(trace, rng) for _ in range(SPLITS)]
    correlation = prefill_decode_correlation(trace.prefill, trace.decode, trace.labels, rng)
    skew = expert_skew(trace.decode, trace.decode_covered)
    return Statistics(
        tasks=locality(trace, TASKS, rng),
        languages=locality(trace, LANGUAGES, rng),
        everything=_locality(whole),
        by_domain={pool.pool: pool.active.value for pool in whole[1].pools if pool.active},
        purity=float(np.mean(purities)),
        purity_least=min(purities),
        own=correlation.own.mean,
        other=correlation.other.mean if correlation.other else float("nan"),
        rho=_rho(trace, rng),
        load=float(np.mean([layer.max_over_mean for layer in skew])),
        unused=sum(layer.unused for layer in skew),
    )


def locality(trace: ActivationTrace, domains: Sequence[str], rng: np.random.Generator) -> Locality:
    """Batches of one domain against batches mixed of these domains."""
    return _locality(_compare(trace, domains, rng))


def _compare(trace: ActivationTrace, domains: Sequence[str], rng: np.random.Generator) -> tuple[ActiveExperts, ...]:
    """Mixed batches, then batches of one domain; drawn without replacement."""
    part = trace.select([i for i, label in enumerate(trace.labels) if label in domains])
    use = DecodeUse(part.decode, part.decode_covered, part.decode_ids)
    placements = {RANDOM: {"all": np.arange(len(part))}, "domain": members_of(part.labels)}
    return active_experts(use, placements, rng, sizes=(BATCH,), draws=DRAWS)


def _locality(found: tuple[ActiveExperts, ...]) -> Locality:
    mixed, same = found
    if not (mixed.active and same.active and same.reduction):
        raise ValueError(f"a domain has not more than {BATCH} requests: {same.reason}")
    return Locality(same.active.value, mixed.active.value, same.reduction.value)


def purity(trace: ActivationTrace, rng: np.random.Generator) -> float:
    """Of clusters fitted to one half of the requests, judged on the other."""
    found = report_clusters(hold_out(trace, CLUSTERS, rng), trace.labels).purity
    return float("nan") if found is None else found


def _rho(trace: ActivationTrace, rng: np.random.Generator) -> dict[str, float]:
    pairs = random_pairs(len(trace), DEFAULT_PAIRS, rng)
    decode = cosines(unit_rows(trace.decode), pairs)
    layers = tuple(range(trace.geometry.layers))
    found = {}
    for kind in KINDS:
        idf = fit_idf(trace.prefill) if kind == "count_idf" else None
        rows = SignatureTransform(trace.geometry, layers, kind, idf).apply(trace.prefill)
        found[kind] = spearman(cosines(rows, pairs), decode)
    return found


def shortfalls(found: Statistics) -> list[str]:
    """The bars that a trained model does not reach, in words."""
    bars = {
        "reduction of tasks": (found.tasks.reduction, 0.15),
        "reduction of languages": (found.languages.reduction, 0.10),
        "purity": (found.purity, 0.75),
    }
    return [f"{name} is {value:.3f}, less than {bar}" for name, (value, bar) in bars.items() if not value >= bar]
