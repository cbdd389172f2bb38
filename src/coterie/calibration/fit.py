"""From a trace to a profile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.activations import ActivationTrace
from coterie.calibration.profile import LayerChoice, Profile
from coterie.clustering import Clustering, Labels, balanced_kmeans
from coterie.core import Counts
from coterie.errors import InputError
from coterie.quality import DEFAULT_PAIRS, Pairs, Rho, random_pairs, select_layers, signature_quality, within_labels
from coterie.signature import COUNT_KINDS, KINDS, Kind, Rows, SignatureTransform, fit_idf

Layers = Literal["greedy", "all"] | tuple[int, ...]
"""Which layers a signature is made of: chosen by greedy selection, all of them, or these positions, ascending."""

Progress = Callable[[str], None]
"""Is told what is done next, in a few words."""


def fit(
    trace: ActivationTrace,
    clusters: int,
    *,
    seed: int = 0,
    starts: int = 5,
    kind: Kind = "count_idf",
    layers: Layers = "greedy",
    pairs: int = DEFAULT_PAIRS,
    progress: Progress = lambda _: None,
) -> Profile:
    """Fit one centroid per decode group to the prompts of a trace (ELDR section 1.3).

    1. Choose the layers whose signatures foretell decoding best (`quality.select_layers`).
    2. Turn the prompts into signatures, and divide them by balanced spherical k-means.
    3. Measure rho of these signatures, on pairs drawn anew: on the pairs that chose the layers it would flatter.
       (A trace with no more than `pairs` pairs has only the same ones to give.)

    Every request of the trace is used, or none: a request that cannot be is an error, never left out in silence.
    In particular a prompt that was only partly counted is refused, for its signature describes another text.

    Each purpose has its own random stream, so another number of pairs or of starts changes nothing else.  The same
    arguments and trace give the same bytes, on any number of threads.

    Args:
        trace: the recorded requests; labels are reported, never used.
        clusters: number K of decode groups.
        seed: not negative.
        starts: seedings of the clustering to try; the most cohesive is kept.
        kind: what signatures are made of, one of `signature.KINDS`; a gateway can route by `COUNT_KINDS` only.
        layers: see `Layers`.
        pairs: pairs of requests to measure rho on, and as many others to choose layers by.
        progress: see `Progress`.

    Raises:
        InputError: fewer requests than clusters, a partly counted prompt, a trace without what `kind` needs,
            layers that cannot be chosen because rho is not defined, or a prompt whose signature is zero.
    """
    if seed < 0:
        raise InputError(f"fit: the seed must not be negative, got {seed}")
    check_requests(trace, clusters)
    streams = Streams.of(seed)
    progress("choosing layers" if layers == "greedy" else "weighing experts")
    transform, choice = choose_transform(trace, kind, layers, random_pairs(len(trace), pairs, streams.choice))
    progress("clustering")
    rows = signatures_of(trace, transform)
    found = balanced_kmeans(rows, clusters, streams.clustering, starts=starts)
    progress("measuring rho")
    rho, within = measure_rho(trace, rows, random_pairs(len(trace), pairs, streams.pairs), streams.intervals)
    return make_profile(trace, transform, found, seed=seed, rho=rho, rho_within_labels=within, layer_choice=choice)


def values_of(trace: ActivationTrace, kind: Kind) -> Counts | npt.NDArray[np.float32]:
    """What signatures of one kind are made of: the trace's prompt counts, or its sums of gate outputs.

    Returns:
        `[N, L, E]`, what `SignatureTransform.apply` takes.

    Raises:
        InputError: there is no such kind, or the trace lacks the sums.
    """
    if kind not in KINDS:
        raise InputError(f"signature: no kind {kind!r}; one of {', '.join(KINDS)}")
    if kind in COUNT_KINDS:
        return trace.prefill
    sums: npt.NDArray[np.float32] | None = getattr(trace, kind)
    if sums is None:
        raise InputError(
            f"signatures of kind {kind} need the trace's {kind} sums, which were not recorded; collect from a "
            f"checkpoint to have them, or use one of {', '.join(COUNT_KINDS)}"
        )
    return sums


# --- the steps, for `transfer` too --------------------------------------------------------------------


class Streams(NamedTuple):
    """The random stream of each purpose.

    Attributes:
        choice: pairs to choose layers by.
        clustering: seedings of the clustering.
        pairs: pairs to measure rho on.
        intervals: resamples for the intervals of rho.
    """

    choice: np.random.Generator
    clustering: np.random.Generator
    pairs: np.random.Generator
    intervals: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Streams:
        """The streams of a seed; one that is added at the end leaves the others alone."""
        return cls(*np.random.default_rng(seed).spawn(len(cls._fields)))


def check_requests(trace: ActivationTrace, clusters: int) -> None:
    """Refuse a trace with too few requests, or with prompts that were only partly counted.

    Raises:
        InputError: naming the numbers and the remedy.
    """
    if not 1 <= clusters <= len(trace):
        raise InputError(
            f"fit: {len(trace)} requests cannot make {clusters} clusters; "
            f"record at least {max(clusters, 1)} with `coterie collect`, or ask for 1 to {len(trace)} clusters"
        )
    partial = np.flatnonzero(~trace.complete)
    if partial.size:
        first = int(partial[0])
        raise InputError(
            f"fit: {partial.size} of {len(trace)} prompts were only partly counted (request {first}: "
            f"{trace.prefill_covered[first]} of {trace.prefill_tokens[first]} tokens); record them again on an "
            "engine that takes no KV cache from outside"
        )


def choose_transform(
    trace: ActivationTrace, kind: Kind, layers: Layers, pairs: Pairs
) -> tuple[SignatureTransform, LayerChoice | None]:
    """The transform of a kind, over chosen or given layers.

    Args:
        trace: the requests; IDF weights, where the kind has them, are those of their prompts.
        kind: see `fit`.
        layers: see `Layers`.
        pairs: `[P, 2]` pairs of requests to choose by.

    Raises:
        InputError: see `fit`.
    """
    values = values_of(trace, kind)
    idf = fit_idf(trace.prefill) if kind == "count_idf" else None
    everything = tuple(range(trace.geometry.layers))
    if layers != "greedy":
        if isinstance(layers, str) and layers != "all":
            raise InputError(f"fit: layers {layers!r} are neither 'greedy' nor 'all' nor positions")
        return SignatureTransform(trace.geometry, everything if layers == "all" else layers, kind, idf), None
    if lacking := _without_decode(trace):
        _refuse_choice(f"{lacking} of {len(trace)} requests have no output counts")
    features = SignatureTransform(trace.geometry, everything, kind, idf).features(values)
    selection = select_layers(features, trace.decode, pairs)
    if np.isnan(selection.rho):
        _refuse_choice(f"over {len(pairs)} pairs of requests, either signatures or outputs are all equally far apart")
    rho_of_all = None if np.isnan(selection.curve[-1]) else selection.curve[-1]
    return SignatureTransform(trace.geometry, selection.layers, kind, idf), LayerChoice(selection.rho, rho_of_all)


def _without_decode(trace: ActivationTrace) -> int:
    return int(np.count_nonzero(trace.decode_covered == 0))


def _refuse_choice(problem: str) -> None:
    raise InputError(
        f"fit: layers cannot be chosen by how well they foretell decoding: {problem}; "
        "record more and longer outputs, or keep all layers (`--layers all`)"
    )


def signatures_of(trace: ActivationTrace, transform: SignatureTransform) -> Rows:
    """`[N, D]` unit signatures of the prompts.

    Raises:
        InputError: one is zero.
    """
    rows = transform.apply(values_of(trace, transform.kind))
    zero = np.flatnonzero(~rows.any(axis=1))
    if zero.size:
        kept, total = len(transform.layers), transform.geometry.layers
        more = "" if kept == total else "keep all layers (`--layers all`), "
        raise InputError(
            f"fit: {zero.size} of {len(rows)} signatures are zero (first: request {zero[0]}): in the layers kept "
            f"({kept} of {total}) these prompts used only experts that every prompt used; {more}record more, and more "
            "different, prompts, or weigh all experts alike (`--transform count`)"
        )
    return rows


def measure_rho(
    trace: ActivationTrace, rows: Rows, pairs: Pairs, rng: np.random.Generator
) -> tuple[Rho | None, Rho | None]:
    """Rho of signatures over pairs, and over those of them whose requests have the same label.

    Returns:
        None where it is not defined: no output counts, no labels, too few pairs, or no variation.
    """
    if _without_decode(trace):
        return None, None
    of_all, of_within = rng.spawn(2)
    same = pairs[within_labels(trace.labels, pairs)]
    with ThreadPoolExecutor(2) as pool:  # numpy computes most of it without holding the interpreter
        found = pool.map(partial(signature_quality, rows, trace.decode), (pairs, same), (of_all, of_within))
    overall, within = (None if np.isnan(rho.value) else rho for rho in found)
    return overall, within


def make_profile(trace: ActivationTrace, transform: SignatureTransform, found: Clustering, **about: Any) -> Profile:
    """The profile of a clustering of a trace; `about` are further fields of `Profile`."""
    names, counts = _count_labels(trace.labels, found.labels, len(found.centroids))
    return Profile(
        model=trace.model,
        transform=transform,
        centroids=found.centroids.astype(np.float32),
        sizes=np.bincount(found.labels, minlength=len(found.centroids)),
        label_names=names,
        label_counts=counts,
        trace_digest=trace.digest(),
        cohesion=found.cohesion,
        **about,
    )


def _count_labels(
    labels: tuple[str, ...], assigned: Labels, clusters: int
) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """The labels in use, and how many requests of each cluster have each."""
    names = tuple(sorted(set(labels) - {""}))
    position = {name: m for m, name in enumerate(names)}
    counts = np.zeros((clusters, len(names)), dtype=np.int64)
    for label, k in zip(labels, assigned, strict=True):
        if label:
            counts[k, position[label]] += 1
    return names, counts
