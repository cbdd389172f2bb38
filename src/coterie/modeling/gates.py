"""Gates: which experts a token chooses, and with which weights.

Ties go to the lower expert id, on every platform.  Softmax gates are those of Mixtral (arXiv 2401.04088,
section 2.1), OLMoE and Qwen3-MoE; sigmoid gates with a bias that only chooses, and limited to groups, are
those of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2, Eq. 12-16).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.modeling.tiles import Floats

Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Experts chosen by T tokens.

    Attributes:
        ids: `[T, k]` expert ids, best first.
        weights: `[T, k]` float32, what each expert's output is multiplied by.
    """

    ids: Ids
    weights: Floats


class SoftmaxRule(msgspec.Struct, frozen=True, tag="softmax"):
    """How a softmax gate chooses.

    Attributes:
        top_k: experts per token.
        renormalise: whether a token's weights are divided by their sum.
    """

    top_k: int
    renormalise: bool


class SigmoidRule(msgspec.Struct, frozen=True, tag="sigmoid"):
    """How a sigmoid gate chooses.

    Attributes:
        top_k: experts per token.
        groups: equal groups that the experts form.
        top_groups: groups that a token may choose from.
        renormalise: whether weights are divided by their sum.
        scaling: factor of the weights, after that.
    """

    top_k: int
    groups: int
    top_groups: int
    renormalise: bool
    scaling: float


GateRule = SoftmaxRule | SigmoidRule


def softmax_gate(logits: Floats, rule: SoftmaxRule) -> Choice:
    """The `top_k` largest of `p = softmax(logits)`; weights `p`, divided by their sum if renormalised.

    Args:
        logits: `[T, E]`.
        rule: top-k and what becomes of the weights.
    """
    ids = best(logits, rule.top_k)
    exponentials: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total: Floats = exponentials.sum(axis=-1, keepdims=True)
    weights = np.take_along_axis(exponentials, ids, axis=-1) / total
    return Choice(ids, weights / _sum_in_order(weights) if rule.renormalise else weights)


def sigmoid_gate(logits: Floats, bias: Floats, rule: SigmoidRule) -> Choice:
    """Choose by `s + bias` with `s = sigmoid(logits)`, in the best groups; weights are `s` alone.

    A group is as good as the sum of its two best `s + bias`; the bias balances load and never weighs an output.

    Args:
        logits: `[T, E]`.
        bias: `[E]`.
        rule: top-k, groups and what becomes of the weights.
    """
    with np.errstate(over="ignore"):  # of a logit far below 0; its score is 0
        scores: Floats = np.reciprocal(np.exp(-logits) + np.float32(1))
    ids = best(_in_best_groups(scores + bias, rule), rule.top_k)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if rule.renormalise:
        weights = weights / (_sum_in_order(weights) + np.float32(1e-20))
    return Choice(ids, weights * np.float32(rule.scaling))


def _in_best_groups(values: Floats, rule: SigmoidRule) -> Floats:
    """The values, -inf outside each token's best groups."""
    if rule.top_groups == rule.groups:
        return values
    grouped = values.reshape(len(values), rule.groups, -1)
    two_best = np.take_along_axis(grouped, best(grouped, 2), axis=-1)
    chosen = best(two_best[..., 0] + two_best[..., 1], rule.top_groups)
    allowed = np.zeros((len(values), rule.groups, 1), np.bool_)
    np.put_along_axis(allowed[..., 0], chosen, values=True, axis=-1)
    return np.where(allowed, grouped, np.float32(-np.inf)).reshape(values.shape)


def best(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest of the last axis, best first; the lower index wins a tie.

    So many passes of argmax are faster than a sort for the few experts that a token chooses.
    """
    left = values.reshape(-1, values.shape[-1]).copy()
    rows, indices = np.arange(len(left)), np.empty((len(left), count), np.intp)
    for place in range(count):
        indices[:, place] = chosen = left.argmax(axis=-1)
        left[rows, chosen] = -np.inf
    return indices.reshape(*values.shape[:-1], count)


def _sum_in_order(weights: Floats) -> Floats:
    """Sum over the last axis, first to last: `[T, k]` to `[T, 1]`."""
    total = weights[:, :1].copy()
    for place in range(1, weights.shape[1]):
        total += weights[:, place, None]
    return total
