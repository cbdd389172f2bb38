"""Expert layers against the plain formula, and their laws."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.modeling import experts
from coterie.modeling.experts import ExpertWeights, block_expert, routed
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
