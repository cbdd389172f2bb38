"""How evenly experts are used, and how domains differ in that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.analysis.correlation import Floats, Indices
from coterie.core import Counts
from coterie.errors import InputError

HOTTEST = 4


@dataclass(frozen=True, slots=True)
class HotExpert:
    """One much used expert.

    Attributes:
        expert: its number within the layer.
        share: share of the layer's tokens that chose it; at most 1, and top_k / E on average.
    """

    expert: int
    share: float


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """How unevenly the tokens of all requests use the experts of one layer.

    Attributes:
        layer: position among the MoE layers.
        max_over_mean: use of the most used expert over the mean use; 1 if all are used alike, E / top_k at most.
        gini: Gini coefficient of the use; 0 if all are used alike, towards 1 if few do everything.
        unused: experts that no token chose.
        hot: the most used experts, most used first; the lower number among equals.
    """

    layer: int
    max_over_mean: float
    gini: float
    unused: int
    hot: tuple[HotExpert, ...]


def expert_skew(counts: Counts, tokens: npt.NDArray[np.int64], *, hottest: int = HOTTEST) -> tuple[LayerSkew, ...]:
    """Measure each layer's skew.

        max_over_mean = max(x) / mean(x)
        gini          = sum over i of (2 i - E - 1) x[i] / (E * sum(x)),   x ascending, i = 1 .. E

    where x[e] is how many tokens of all requests chose expert e.

    Args:
        counts: `[N, L, E]`.
        tokens: `[N]` tokens counted.
        hottest: how many hot experts to name.

    Raises:
        InputError: no tokens at all.
    """
    if not tokens.sum() > 0:
        raise InputError("expert skew: no tokens were counted")
    return tuple(_skew(layer, x, int(tokens.sum()), hottest) for layer, x in enumerate(_sums(counts)))


def _skew(layer: int, x: Floats, tokens: int, hottest: int) -> LayerSkew:
    E = len(x)
    gini = float((2 * np.arange(1, E + 1) - E - 1) @ np.sort(x) / (E * x.sum()))
    hot = tuple(HotExpert(int(e), float(x[e]) / tokens) for e in np.argsort(-x, kind="stable")[:hottest])
    return LayerSkew(layer, float(x.max() / x.mean()), gini, int((x == 0).sum()), hot)


def _sums(counts: Counts) -> Floats:
    sums: Floats = counts.sum(axis=0, dtype=np.uint64).astype(np.float64)
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class DomainUse:
    """Which experts each group of requests uses.

    Attributes:
        names: `[G]` names of the groups.
        difference: `[L]` share of expert choices that a group makes differently from the mean of all groups: total
            variation distance, mean over the groups.  0: all alike.
        layer: the layer in which the groups differ most; the first among equals.
        share: `[G, E]` share of each group's tokens that chose each expert of that layer.
    """

    names: tuple[str, ...]
    difference: Floats
    layer: int
    share: Floats


def domain_use(counts: Counts, tokens: npt.NDArray[np.int64], groups: Mapping[str, Indices]) -> DomainUse:
    """Compare groups by the experts that they use.

        p[g, l, e]    = share of the expert choices of group g in layer l that fell on e
        difference[l] = mean over g of 1/2 * sum over e of |p[g, l, e] - mean over g of p[g, l, e]|

    Args:
        counts: `[N, L, E]`.
        tokens: `[N]` tokens counted.
        groups: requests of each domain or cluster, each with at least one token.

    Raises:
        InputError: no groups, or one without tokens.
    """
    if not groups or not all(tokens[members].sum() > 0 for members in groups.values()):
        raise InputError("domain use: needs groups, each with counted tokens")
    sums = np.stack([_sums(counts[members]) for members in groups.values()])  # (G, L, E)
    p = sums / sums.sum(axis=-1, keepdims=True)
    difference: Floats = np.abs(p - p.mean(axis=0)).sum(axis=-1).mean(axis=0) / 2
    layer = int(difference.argmax())
    totals = np.array([tokens[members].sum() for members in groups.values()])
    return DomainUse(tuple(groups), difference, layer, sums[:, layer] / totals[:, None])
