"""Gates, by hand and against a search over all subsets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.modeling.gates import SigmoidRule, SoftmaxRule, best, sigmoid_gate, softmax_gate


def row(*values):
    return np.array([values], np.float32)


def test_softmax_weights_by_hand():
    # exp(0), exp(log 2), exp(log 5) = 1, 2, 5 of 8
    choice = softmax_gate(np.log(row(1, 2, 5)), SoftmaxRule(2, renormalise=False))
    assert choice.ids.tolist() == [[2, 1]]
    np.testing.assert_allclose(choice.weights, [[5 / 8, 2 / 8]], rtol=1e-6)


def test_renormalised_softmax_weights_sum_to_one():
    choice = softmax_gate(np.log(row(1, 2, 5)), SoftmaxRule(2, renormalise=True))
    np.testing.assert_allclose(choice.weights, [[5 / 7, 2 / 7]], rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh():
    # sigmoid(0) = 1/2 everywhere; the bias makes expert 2 and then 0 best; weights 1/2 each, scaled by 3
    choice = sigmoid_gate(row(0, 0, 0), np.array([0.1, 0, 0.2], np.float32), SigmoidRule(2, 1, 1, False, 3.0))
    assert choice.ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(choice.weights, [[1.5, 1.5]])


def test_experts_outside_the_best_groups_are_not_chosen():
    # two groups of three; by their two best the second group (2 + 2) beats the first (3 + 0), whose best stays out
    logits, rule = row(3, 0, 0, 2, 2, 0), SigmoidRule(2, 2, 1, True, 1.0)
    assert sorted(sigmoid_gate(logits, np.zeros(6, np.float32), rule).ids[0]) == [3, 4]


def test_ties_go_to_the_lower_index():
    assert best(row(1, 5, 5, 1, 5), 4).tolist() == [[1, 2, 4, 0]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([(4, 1), (4, 2), (2, 1), (1, 1)]))
def test_the_choice_is_the_best_of_all_that_are_allowed(seed, top_k, groups):
    rng = np.random.default_rng(seed)
    count, kept = groups
    logits, bias = rng.standard_normal((3, 16), dtype=np.float32), rng.standard_normal(16, dtype=np.float32) / 4
    rule = SigmoidRule(top_k, count, kept, True, 2.5)
    choice = sigmoid_gate(logits, bias, rule)
    for logit, ids, weights in zip(logits, choice.ids, choice.weights, strict=True):
        score = 1 / (1 + np.exp(-logit.astype(float)))
        members = np.arange(16).reshape(count, -1)
        worth = [np.sort((score + bias)[group])[-2:].sum() for group in members]
        allowed = members[np.argsort(worth)[-kept:]].ravel()
        most = max(combinations(allowed, top_k), key=lambda some: (score + bias)[list(some)].sum())
        assert sorted(ids) == sorted(most)
        np.testing.assert_allclose(weights, 2.5 * score[ids] / score[ids].sum(), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 5])
def test_a_token_s_choice_does_not_depend_on_the_others(size):
    logits = np.random.default_rng(0).standard_normal((20, 64), dtype=np.float32)
    whole = softmax_gate(logits, SoftmaxRule(8, renormalise=True))
    part = softmax_gate(logits[7 : 7 + size], SoftmaxRule(8, renormalise=True))
    np.testing.assert_array_equal(part.ids, whole.ids[7 : 7 + size])
    np.testing.assert_array_equal(part.weights, whole.weights[7 : 7 + size])


def test_a_logit_far_below_zero_scores_nothing():
    choice = sigmoid_gate(row(-1000, 0), np.zeros(2, np.float32), SigmoidRule(2, 1, 1, False, 1.0))
    assert choice.weights.tolist() == [[0.5, 0.0]]
