#!/usr/bin/env python3
"""What a transferred profile costs against a full fit: held-out clusters of few prompts, alone and with a donor.

    python bench/transfer.py [--donor A.trace --target B.trace] [--clusters 8] [--splits 5] [--json]

Both traces hold the same prompts, run by two models; prompts of one trace only are left out.  In each split half of
the prompts are for fitting and the others for judging.  The donor's profile is fitted to its half; the target model
has n of these prompts only:

    alone      `fit` on the n prompts
    like       `transfer`: the n prompts divided as the donor divides them
    like + 50  the same, then up to 50 rounds of balanced k-means
    full       `fit` on the whole half: what the target model's own trace would give

Judged on the other half of the target's trace, at the nearest centroid: mean cosine to it, purity, the largest
cluster over the mean, and active experts of batches of 32 from one cluster, against random batches.  Means over
the splits.  Signatures are over all layers.  Without traces, two made-up models are compared: prompts have a hidden
meaning in common, and each model's experts answer to it in a way of their own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from coterie.activations import ActivationTrace
from coterie.analysis import DecodeUse, active_experts, judge, report_clusters
from coterie.calibration import Profile, fit, transfer
from coterie.core import ModelGeometry, prompt_hash
from coterie.errors import InputError

FEW = (16, 32, 64, 128, 256)
BATCH = 32
PAIRS = 1000  # rho is not what is measured here
MEANINGS, DOMAINS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 8, 64, 32


@dataclass(frozen=True)
class Judged:
    """A profile on held-out requests; `reduction` is None where no cluster holds a batch."""

    cohesion: float
    purity: float
    largest: float
    reduction: float | None


# --- made-up models -----------------------------------------------------------------------------------


def made_up_pair(requests: int = 768) -> tuple[ActivationTrace, ActivationTrace]:
    rng = np.random.default_rng(0)
    domains = rng.integers(DOMAINS, size=requests)
    meaning = rng.normal(size=(DOMAINS, MEANINGS))[domains] + 0.6 * rng.normal(size=(requests, MEANINGS))
    geometries = ModelGeometry(5, 64, 4), ModelGeometry(8, 32, 2)
    one, other = (
        made_up_trace(name, geometry, meaning, domains, stream)
        for name, geometry, stream in zip("ab", geometries, rng.spawn(2), strict=True)
    )
    return one, other


def made_up_trace(
    name: str, geometry: ModelGeometry, meaning: np.ndarray, domains: np.ndarray, rng: np.random.Generator
) -> ActivationTrace:
    shape = (geometry.layers, geometry.experts)
    answers = 1.5 * rng.normal(size=(MEANINGS, *shape)) / np.sqrt(MEANINGS)
    affinity = np.einsum("nm,mle->nle", meaning, answers) + rng.normal(size=shape)
    prefill, decode = draw(affinity, PROMPT_TOKENS, geometry, rng), draw(affinity, OUTPUT_TOKENS, geometry, rng)
    N, E = len(domains), geometry.experts
    return ActivationTrace(
        model=f"made-up {name}",
        geometry=geometry,
        prefill=np.stack([tally(ids, E) for ids in prefill]),
        decode=np.stack([tally(ids, E) for ids in decode]),
        prefill_tokens=np.full(N, PROMPT_TOKENS),
        prefill_covered=np.full(N, PROMPT_TOKENS),
        decode_tokens=np.full(N, OUTPUT_TOKENS + 1),
        decode_covered=np.full(N, OUTPUT_TOKENS),
        prompt_hashes=tuple(prompt_hash([i]) for i in range(N)),
        labels=tuple(f"domain {d}" for d in domains),
        decode_ids=decode.reshape(-1, geometry.layers, geometry.top_k),
    )


def draw(affinity: np.ndarray, tokens: int, geometry: ModelGeometry, rng: np.random.Generator) -> np.ndarray:
    """`[N, tokens, L, top_k]` ids, drawn without replacement by the Gumbel trick."""
    noise = rng.gumbel(size=(len(affinity), tokens, *affinity.shape[1:]))
    chosen = np.argpartition(affinity[:, None] + noise, -geometry.top_k, axis=-1)[..., -geometry.top_k :]
    return chosen.astype(np.uint8)


def tally(ids: np.ndarray, experts: int) -> np.ndarray:
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])]).astype(
        np.uint16
    )


# --- measuring ----------------------------------------------------------------------------------------


def judged(profile: Profile, trace: ActivationTrace, rng: np.random.Generator) -> Judged:
    held = judge(trace, profile)
    report = report_clusters(held, trace.labels)
    use = DecodeUse(trace.decode, trace.decode_covered, trace.decode_ids)
    placements = {"random": {"all": held.requests}, "cluster": held.pools()}
    _, cluster = active_experts(use, placements, rng, sizes=(BATCH,))
    cohesion = float((held.rows * profile.centroids[held.nearest]).sum(axis=1).mean())
    reduction = cluster.reduction.value if cluster.reduction else None
    return Judged(cohesion, report.purity or 0.0, report.largest_over_mean, reduction)


def profiles(
    donor: ActivationTrace, target: ActivationTrace, clusters: int, n: int, seed: int
) -> Iterator[tuple[str, Profile]]:
    """Each way to make a profile of the first n requests of the target; a way that cannot is left out."""
    few = target.select(range(n))
    same = {"seed": seed, "layers": "all", "pairs": PAIRS}
    donor_profile = fit(donor, clusters, **same)
    yield "alone", fit(few, clusters, **same)
    try:
        yield "like", transfer(few, donor, donor_profile, **same)
        yield "like + 50", transfer(few, donor, donor_profile, rounds=50, **same)
    except InputError as error:
        Console(stderr=True).print(f"n = {n}, split {seed}: {error}", highlight=False)


def measure(donor: ActivationTrace, target: ActivationTrace, clusters: int, splits: int) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    target = common(donor, target)
    half = len(target) // 2
    for seed in range(splits):
        order = np.random.default_rng(seed).permutation(len(target))
        fitting, unseen = order[:half], target.select(order[half:])
        ours, theirs = target.select(fitting), donor.select(positions(donor, target, fitting))
        for n in [n for n in FEW if clusters <= n < half]:
            for name, profile in profiles(theirs, ours, clusters, n, seed):
                found.setdefault(f"{n} {name}", []).append(judged(profile, unseen, np.random.default_rng(seed)))
        full = fit(ours, clusters, seed=seed, layers="all", pairs=PAIRS)
        found.setdefault(f"{half} full", []).append(judged(full, unseen, np.random.default_rng(seed)))
    return dict(sorted(found.items(), key=lambda item: int(item[0].split()[0])))


def common(donor: ActivationTrace, target: ActivationTrace) -> ActivationTrace:
    """The requests of the target whose prompts the donor ran too."""
    known = set(donor.prompt_hashes)
    return target.select([i for i, prompt in enumerate(target.prompt_hashes) if prompt in known])


def positions(donor: ActivationTrace, target: ActivationTrace, requests: np.ndarray) -> list[int]:
    """Where the donor ran the same prompts."""
    place = {prompt: i for i, prompt in enumerate(donor.prompt_hashes)}
    return [place[target.prompt_hashes[i]] for i in requests]


def mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--donor", help="trace of the model whose clusters are used")
    parser.add_argument("--target", help="trace of the new model, of the same prompts")
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.donor is None) != (options.target is None):
        parser.error("--donor and --target belong together")
    traces = options.donor and [ActivationTrace.load(path) for path in (options.donor, options.target)]
    donor, target = traces or made_up_pair()
    found = measure(donor, target, options.clusters, options.splits)
    rows = {
        name: {"splits": len(runs)} | {field: mean([asdict(run)[field] for run in runs]) for field in asdict(runs[0])}
        for name, runs in found.items()
    }
    if options.json:
        print(json.dumps({"donor": donor.model, "target": target.model, "clusters": options.clusters, "rows": rows}))
        return
    table = Table("prompts, how", "splits", "cosine", "purity", "largest / mean", "fewer active experts", box=None)
    for name, row in rows.items():
        reduction = "-" if row["reduction"] is None else f"{row['reduction']:.1%}"
        figures = f"{row['cohesion']:.3f}", f"{row['purity']:.3f}", f"{row['largest']:.2f}", reduction
        table.add_row(name, str(row["splits"]), *figures)
    print(f"donor: {donor.model}, {donor.geometry}; target: {target.model}, {target.geometry}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
