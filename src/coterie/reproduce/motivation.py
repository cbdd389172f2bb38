"""What ELDR's section on motivation measures of a model and a workload, measured of recorded or made-up requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.analysis import DecodeUse
from coterie.analysis.correlation import Floats, correlations
from coterie.core import ModelGeometry
from coterie.published import Workload
from coterie.quality import cosines, random_pairs, spearman
from coterie.signature import Kind, SignatureTransform, fit_idf
from coterie.sim.generator import Recipe, make_trace

BATCH_SIZES = (32, 64, 128)
"""Of the same-domain batches of ELDR's section on motivation."""

_POOL = 150  # more than the largest batch
_DRAWS = 60
_PAIRS = 10_000


@dataclass(frozen=True, slots=True)
class Motivation:
    """The statistics.

    Attributes:
        same_domain: by batch size, by how much fewer (a share) experts a batch of one domain activates than a mixed
            one; mean over domains, weighted by their requests.
        r: Pearson's r of a request's prefill and decode counts, mean over requests.
        rho: by kind of signature, over all layers.
    """

    same_domain: Mapping[int, float]
    r: float
    rho: Mapping[Kind, float]


def measure(
    recipe: Recipe,
    workload: Workload,
    geometry: ModelGeometry,
    requests: int,
    *,
    seed: int = 0,
    kinds: Sequence[Kind] = ("count_idf",),
) -> Motivation:
    """Measure made-up requests.

    Args:
        recipe: what they are made of.
        workload: which domains' batches to measure, and the domains' shares.
        geometry: of the model.
        requests: to measure r and rho of.  Batches are of others, drawn from each domain by itself: rare domains would
            fill none.
        seed: of all that is drawn.
        kinds: of signatures.
    """
    trace = make_trace(recipe, geometry, requests, seed=seed)
    rng = np.random.default_rng(seed)
    pairs = random_pairs(requests, _PAIRS, rng)
    outputs = cosines(trace.decode, pairs)
    everyone = np.arange(requests)
    pools = {
        domain: make_trace(recipe.mixed({domain: 1.0}), geometry, _POOL, seed=seed, sample=1 + i)
        for i, domain in enumerate(workload.measured)
    }
    shares = np.array([workload.domains[domain].share for domain in pools])
    return Motivation(
        same_domain=_same_domain(list(pools.values()), shares / shares.sum(), rng),
        r=float(np.nanmean(correlations(trace.prefill, trace.decode, everyone, everyone))),
        rho={kind: spearman(cosines(_signatures(trace, kind), pairs), outputs) for kind in kinds},
    )


def _signatures(trace: ActivationTrace, kind: Kind) -> npt.NDArray[np.float32]:
    idf = fit_idf(trace.prefill) if kind == "count_idf" else None
    return SignatureTransform(trace.geometry, tuple(range(trace.geometry.layers)), kind, idf).apply(trace.prefill)


def _same_domain(pools: Sequence[ActivationTrace], shares: Floats, rng: np.random.Generator) -> dict[int, float]:
    """By how much fewer experts batches of one pool activate than batches of all, drawn by the pools' shares."""
    use = DecodeUse(
        np.concatenate([pool.decode for pool in pools]), np.concatenate([pool.decode_covered for pool in pools])
    )
    of_pool = np.repeat(np.eye(len(pools)), [len(pool) for pool in pools], axis=1)  # (pools, requests)
    likely = of_pool / of_pool.sum(axis=1, keepdims=True)

    def active(chances: Floats, size: int) -> float:
        batches = [rng.choice(len(chances), size, replace=False, p=chances) for _ in range(_DRAWS)]
        return float(use.active(batches).mean())

    found = {}
    for size in BATCH_SIZES:
        alone = sum(share * active(chances, size) for share, chances in zip(shares, likely, strict=True))
        found[size] = 1 - alone / active(shares @ likely, size)
    return found
