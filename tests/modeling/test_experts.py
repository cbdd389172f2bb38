"""Expert layers against the plain formula, and their laws."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.modeling import experts
from coterie.modeling.experts import Bounded, ExpertWeights, block_biases, block_expert, routed
from coterie.modeling.gates import Choice

HIDDEN = 20


def random_experts(count, size, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(count, size, HIDDEN), (count, size, HIDDEN), (count, HIDDEN, size)]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def pack(parts, blocks):
    gate_up, down = zip(*(block_expert(*expert, blocks) for expert in zip(*parts, strict=True)), strict=True)
    return ExpertWeights(np.stack(gate_up), np.stack(down))


def plain(row, gate, up, down):
    row, gate, up, down = (part.astype(float) for part in (row, gate, up, down))
    inner = gate @ row
    return down @ (inner / (1 + np.exp(-inner)) * (up @ row))


def bounded_experts(count, size, slope, limit):
    """Parts of random experts with biases, and their weights."""
    rng, parts, blocks = np.random.default_rng(9), random_experts(count, size), -(-size // 64)
    biases = [rng.standard_normal((count, columns), dtype=np.float32) for columns in (size, size, HIDDEN)]
    inward = np.stack([block_biases(gate, up, blocks) for gate, up, _ in zip(*biases, strict=True)])
    weights = pack(parts, blocks)
    return parts, biases, ExpertWeights(weights.gate_up, weights.down, Bounded(inward, biases[2], slope, limit))


def plain_bounded(row, parts, biases, slope, limit):
    (gate, up, down), (gate_bias, up_bias, down_bias) = parts, biases
    g = np.minimum(gate.astype(float) @ row + gate_bias, limit)
    u = np.clip(up.astype(float) @ row + up_bias, -limit, limit)
    return down.astype(float) @ (g / (1 + np.exp(-slope * g)) * (u + 1)) + down_bias


def random_choice(tokens, count, top_k, seed=1):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(count)[:top_k] for _ in range(tokens)])
    return Choice(ids, rng.random((tokens, top_k), dtype=np.float32))


def rows_of(tokens, seed=2):
    return np.random.default_rng(seed).standard_normal((tokens, HIDDEN), dtype=np.float32)


@pytest.mark.parametrize("size", [24, 64, 100])
def test_routed_experts_are_the_weighted_sum_of_their_formula(size, any_kernel):
    parts, rows, choice = random_experts(6, size), rows_of(9), random_choice(9, 6, 3)
    expected = [
        sum(w * plain(row, *(part[e] for part in parts)) for e, w in zip(ids, weights, strict=True))
        for row, ids, weights in zip(rows, choice.ids, choice.weights, strict=True)
    ]
    result = any_kernel.routed(rows, choice, pack(parts, -(-size // 64)))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [24, 100])
def test_bounded_experts_are_the_weighted_sum_of_their_formula(size, any_kernel):
    parts, biases, weights = bounded_experts(6, size, slope=1.7, limit=2.5)
    rows, choice = rows_of(70), random_choice(70, 6, 3)  # more than 64 tokens of some expert
    expected = [
        sum(
            w * plain_bounded(row, [part[e] for part in parts], [bias[e] for bias in biases], 1.7, 2.5)
            for e, w in zip(ids, by, strict=True)
        )
        for row, ids, by in zip(rows, choice.ids, choice.weights, strict=True)
    ]
    np.testing.assert_allclose(any_kernel.routed(rows, choice, weights), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bounded", [False, True])
def test_an_expert_of_minus_one_adds_nothing(bounded, any_kernel):
    weights = bounded_experts(6, 24, 1.7, 2.5)[2] if bounded else pack(random_experts(6, 24), 1)
    rows, choice = rows_of(50), random_choice(50, 6, 3)
    ids = np.where(np.random.default_rng(3).random((50, 3)) < 0.5, -1, choice.ids)
    result = any_kernel.routed(rows, Choice(ids, choice.weights), weights)
    for row, own, by, got in zip(rows, ids, choice.weights, result, strict=True):
        alone = Choice(own[own >= 0][None], by[own >= 0][None])
        expected = any_kernel.routed(row[None], alone, weights)[0] if alone.ids.size else np.zeros(HIDDEN)
        np.testing.assert_array_equal(got, expected)


def test_a_dense_feed_forward_is_its_formula(any_kernel):
    parts, rows = random_experts(1, 100), rows_of(21)
    expected = [plain(row, *(part[0] for part in parts)) for row in rows]
    np.testing.assert_allclose(any_kernel.dense(rows, pack(parts, 2)), expected, rtol=1e-4, atol=1e-3)


def test_padding_changes_no_bit(any_kernel):
    parts, rows, choice = random_experts(6, 100), rows_of(9), random_choice(9, 6, 3)
    padded = any_kernel.routed(rows, choice, pack(parts, 32))
    np.testing.assert_array_equal(padded, any_kernel.routed(rows, choice, pack(parts, 2)))


def test_experts_that_no_token_chose_are_not_read(any_kernel):
    parts, choice = random_experts(6, 24), random_choice(5, 3, 2)  # only experts 0, 1 and 2
    weights = pack(parts, 1)
    result = any_kernel.routed(rows_of(5), choice, weights)
    weights.gate_up[3:] = weights.down[3:] = np.nan
    np.testing.assert_array_equal(any_kernel.routed(rows_of(5), choice, weights), result)


@pytest.mark.parametrize("wave", [1, 7, 1024])
def test_a_token_s_bits_depend_on_no_other_token_and_on_no_wave(wave, monkeypatch):
    rows, choice, weights = rows_of(60), random_choice(60, 6, 3), pack(random_experts(6, 24), 1)
    together = routed(rows, choice, weights)
    monkeypatch.setattr(experts, "WAVE", wave)
    rng = np.random.default_rng(wave)
    for _ in range(20):
        some = rng.permutation(60)[: rng.integers(1, 61)]
        part = routed(rows[some], Choice(choice.ids[some], choice.weights[some]), weights)
        np.testing.assert_array_equal(part, together[some])


def test_no_tokens_give_no_rows(any_kernel):
    empty = Choice(np.empty((0, 3), np.intp), np.empty((0, 3), np.float32))
    assert any_kernel.routed(np.empty((0, HIDDEN), np.float32), empty, pack(random_experts(6, 24), 1)).shape == (
        0,
        HIDDEN,
    )


def test_inputs_far_below_zero_pass_no_gate(any_kernel):
    # silu(-1000) = 0: exp(1000) is infinite in float32, and no warning tells of it
    one = np.zeros((1, 1, HIDDEN), np.float32)
    one[..., 0] = 1
    weights = pack([one, one, one.swapaxes(1, 2)], 1)
    assert not any_kernel.dense(np.full((1, HIDDEN), -1000, np.float32), weights).any()
