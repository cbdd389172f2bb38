"""Tokens are drawn as the formulas say, and by nothing but a request's own parameters and position."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.embedded.sampling import Draw, SamplingParams, sample, uniform
from coterie.errors import RequestError

HALVES = st.integers(-8, 8).map(lambda n: n / 2)  # so that equal logits are common


def chances_by_hand(logits, params, forbidden=frozenset()):
    """Probability of each token, one token at a time."""
    ranked = sorted((i for i in range(len(logits)) if i not in forbidden), key=lambda i: (-logits[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = {i: math.exp((logits[i] - logits[ranked[0]]) / params.temperature) for i in ranked}
    kept, mass, whole = [], 0.0, math.fsum(weights.values())
    for token in ranked:
        kept.append(token)
        mass += weights[token]
        if mass >= params.top_p * whole * (1 - 1e-12):
            break
    total = math.fsum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def draw(params, position=0, choice=0, forbidden=frozenset()):
    return Draw(params, choice, position, forbidden)


@given(
    st.lists(HALVES, min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 3, 7, 40]),
    st.sampled_from([0.001, 0.37, 0.81, 0.999, 1.0]),
    st.integers(0, 200),
)
def test_the_token_is_where_the_sum_of_kept_chances_passes_the_random_number(logits, temperature, top_k, top_p, at):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=5)
    chances = chances_by_hand(logits, params)
    u, below = uniform(5, 0, at), 0.0
    token = sample(np.array([logits], np.float32), [draw(params, at)])[0]
    below = math.fsum(chance for other, chance in chances.items() if other < token)
    assert below - 1e-9 <= u < below + chances[token] + 1e-9


def test_a_nucleus_takes_no_more_tokens_than_it_needs_and_of_the_equal_the_lowest():
    logits = np.log(np.array([[0.1, 0.2, 0.4, 0.2, 0.1]], np.float32))
    params = SamplingParams(top_p=0.55, seed=1)  # 0.4 + 0.2 are enough
    assert {sample(logits, [draw(params, at)])[0] for at in range(200)} == {1, 2}
    params = SamplingParams(top_k=3, top_p=0.8, seed=1)  # of 0.2, 0.4, 0.2 these are 0.8 * 0.8 = 0.64
    assert {sample(logits, [draw(params, at)])[0] for at in range(200)} == {1, 2, 3}


def test_of_equal_logits_greedy_takes_the_lowest_token():
    assert sample(np.array([[0, 3, 3], [2, 2, 1]], np.float32), [draw(SamplingParams(temperature=0))] * 2) == [1, 0]


def test_a_forbidden_token_is_never_chosen():
    logits = np.array([[9.0, 1.0, 0.0]], np.float32)
    assert sample(logits, [draw(SamplingParams(temperature=0), forbidden=frozenset({0}))]) == [1]
    params = SamplingParams(seed=3, top_k=2)
    found = {sample(logits, [draw(params, at, forbidden=frozenset({0}))])[0] for at in range(100)}
    assert found == {1, 2}
    assert logits[0, 0] == 9


@given(st.integers(0, 2**32), st.permutations(range(9)))
def test_a_row_is_drawn_alike_in_every_batch(seed, order):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(9, 301)).astype(np.float32)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, seed=seed)
        for t, k, p in [(0, 0, 1), (1, 0, 1), (0.7, 0, 0.9), (1, 50, 1), (1.3, 40, 0.6), (1, 1, 1), (2, 0, 1)]
    ]
    draws = [draw(params[row % 7], row, row // 7) for row in range(9)]
    alone = [sample(logits[row : row + 1], draws[row : row + 1])[0] for row in range(9)]
    assert sample(logits[list(order)], [draws[row] for row in order]) == [alone[row] for row in order]


def test_random_numbers_differ_by_seed_choice_and_position_and_spread_evenly():
    numbers = [uniform(s, c, p) for s in (1, 2) for c in (0, 1) for p in range(2500)]
    assert len(set(numbers)) == 10_000
    share = np.histogram(numbers, 10, (0, 1))[0]  # 1000 each, standard deviation 30
    assert abs(share - 1000).max() < 5 * 30
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_nothing_to_sample_is_no_token():
    assert sample(np.zeros((0, 5), np.float32), []) == []


@pytest.mark.parametrize(
    "wrong", [[0, np.nan, 1], [np.nan] * 3, [np.inf, 0, 0], [-np.inf] * 3, [np.nan, np.inf, -np.inf]]
)
@pytest.mark.parametrize(
    "changes", [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"top_k": 1, "top_p": 0.1}, {"temperature": 1e-5}]
)
def test_a_row_that_is_not_finite_has_no_token_and_the_others_have(wrong, changes):
    rows = np.array([[0, 1, 9], wrong, [9, 1, 0]], np.float32)
    draws = [draw(SamplingParams(temperature=0)), draw(SamplingParams(**changes)), draw(SamplingParams(temperature=0))]
    assert sample(rows, draws) == [2, None, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens: must be from 0 to max_tokens, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: must be from 0 to max_tokens, got 5"),
        ({"temperature": -0.1}, "temperature: must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature: must be finite"),
        ({"temperature": math.inf}, "temperature: must be finite"),
        ({"top_p": 0.0}, "top_p: must be more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p: must be more than 0 and at most 1"),
        ({"top_k": -1}, "top_k: must be at least 1, or 0 for all tokens, got -1"),
        ({"seed": 1 << 64}, "seed: must be of at most 64 bits"),
        ({"stop": ("a", "")}, "stop: must be strings of 1 to 1024 characters, got ''"),
        ({"stop": ("x" * 1025,)}, "stop: must be strings of 1 to 1024 characters"),
        ({"stop": ("x",) * 65}, "stop: must be at most 64 strings, got '65 strings'"),
    ],
)
def test_parameters_out_of_range_are_named(fields, message):
    with pytest.raises(RequestError, match=message.replace("(", r"\(")) as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))
