"""What an inspection of a trace finds: values only."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.analysis.active import Method
from coterie.analysis.batches import ActiveExperts
from coterie.analysis.correlation import Correlation
from coterie.analysis.heldout import ClusterReport
from coterie.analysis.projection import Projection
from coterie.analysis.usage import DomainUse, LayerSkew
from coterie.analysis.verdict import Verdict
from coterie.core import ModelGeometry
from coterie.quality import LayerSelection, Rho
from coterie.signature import Kind


@dataclass(frozen=True, slots=True)
class Subject:
    """What was inspected.

    Attributes:
        model: name of the model.
        geometry: L, E and top-k.
        digest: `ActivationTrace.digest`.
        requests: requests of the trace.
        partly_counted: requests left out because only a part of their prompt was counted.
        without_output: requests left out because none of their output tokens was counted, while others' were.
        repeated: requests left out because an earlier one has the same prompt: of two copies, one in each half, neither
            is held out.
        used: requests that all figures are of.
        labels: how many of them have each label; the empty one is none.
        prompt_tokens: their prompt tokens.
        output_tokens: their counted output tokens.
    """

    model: str
    geometry: ModelGeometry
    digest: str
    requests: int
    partly_counted: int
    without_output: int
    repeated: int
    used: int
    labels: dict[str, int]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class KindQuality:
    """rho of one kind of signature over all layers.

    Attributes:
        kind: the kind.
        rho: over random pairs of requests.
        within: over those of them that have the same label; None where it is not defined.
    """

    kind: Kind
    rho: Rho
    within: Rho | None


@dataclass(frozen=True, slots=True)
class PlottedClusters:
    """Signatures of judged requests in two dimensions.

    Attributes:
        projection: the points and the centroids.
        labels: `[N]` label of each point.
    """

    projection: Projection
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """What could not be measured.

    Attributes:
        part: the field of `Inspection`.
        reason: why.
    """

    part: str
    reason: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a trace tells.  A field is None where `missing` says why.

    Attributes:
        subject: what was inspected.
        seed: seed of every choice by chance.
        verdict: is locality worth routing for.
        correlation: prefill and decode.
        quality: rho of each kind of signature that the trace supports.
        selection: greedy choice of layers, for `clusters.kind`.
        clusters: held-out clusters.
        method: how active experts were measured.
        active: active experts of random, domain and cluster batches.
        skew: skew of each layer; of decode, or of prefill if nothing of decode was counted.
        use: experts by domain, or by cluster where there are no labels.
        plot: signatures in two dimensions.
        missing: what could not be measured.
    """

    subject: Subject
    seed: int
    verdict: Verdict
    correlation: Correlation | None
    quality: tuple[KindQuality, ...] | None
    selection: LayerSelection | None
    clusters: ClusterReport | None
    method: Method | None
    active: tuple[ActiveExperts, ...] | None
    skew: tuple[LayerSkew, ...]
    use: DomainUse | None
    plot: PlottedClusters | None
    missing: tuple[Missing, ...]
