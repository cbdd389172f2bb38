from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.sim import population_of
from coterie.sim.choices import draw_counts, marginals
from coterie.sim.generator import Lengths, Recipe, Spread, Topic, make_trace

GEOMETRY = ModelGeometry(layers=2, experts=32, top_k=4)
TOPICS = (Topic("a", "a0", 3), Topic("a", "a1", 1), Topic("b", "b0", 4))
RECIPE = Recipe(Spread(1.0, 1.4, 0.6, 0.4, 0.3), TOPICS, Lengths(60, 0.5))


def cosine(x, y):
    x, y = x.astype(float), y.astype(float)
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


# --- how tokens choose ---------------------------------------------------------------------------------------------


@given(st.integers(1, 31), st.floats(0, 3), st.integers(0, 99))
def test_probabilities_sum_to_top_k_in_each_layer(top_k, spread, seed):
    logits = spread * np.random.default_rng(seed).standard_normal((3, 2, 32))
    found = marginals(logits, top_k)
    assert found.dtype == np.float32
    assert found.min() >= 0
    assert found.max() <= 1
    assert np.allclose(found.sum(axis=-1), top_k, rtol=1e-4)


def test_equal_logits_share_top_k_equally():
    assert np.allclose(marginals(np.zeros((1, 8)), 2), 2 / 8, atol=1e-5)


def test_probabilities_are_near_the_shares_of_tokens_that_draw_without_repetition():
    # adding Gumbel noise to logits and taking the k largest draws k in proportion to exp(logit), without repetition
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(64)
    noisy = logits + rng.gumbel(size=(20_000, 64))
    shares = np.bincount(np.argsort(-noisy, axis=1)[:, :6].ravel(), minlength=64) / 20_000
    assert np.abs(marginals(logits, 6) - shares).max() < 0.02


@settings(max_examples=50)
@given(st.integers(1, 31), st.floats(0, 4), st.lists(st.integers(1, 2000), min_size=1, max_size=4), st.integers(0, 99))
def test_drawn_counts_conserve_tokens(top_k, spread, tokens, seed):
    rng = np.random.default_rng(seed)
    lengths = np.array(tokens)
    counts = draw_counts(marginals(spread * rng.standard_normal((len(tokens), 2, 32)), top_k), lengths, rng)
    assert (counts.sum(axis=-1) == (lengths * top_k)[:, None]).all()
    assert (counts.max(axis=(1, 2)) <= lengths).all()


def test_drawn_counts_scatter_around_their_means():
    probabilities = np.repeat(marginals(np.random.default_rng(0).standard_normal((1, 1, 32)), 4), 4000, axis=0)
    counts = draw_counts(probabilities, np.full(4000, 50), np.random.default_rng(1))
    assert np.abs(counts.mean(axis=0) / 50 - probabilities[0]).max() < 0.01
    # each expert's count is near binomial: variance 50 p (1 - p), a little less since the sum is fixed
    binomial = 50 * probabilities[0] * (1 - probabilities[0])
    assert 0.7 < float(counts.var(axis=0).sum() / binomial.sum()) < 1.1


def test_counts_of_tokens_that_repeat_scatter_as_those_of_fewer_tokens():
    probabilities = np.repeat(marginals(np.random.default_rng(0).standard_normal((1, 1, 32)), 4), 4000, axis=0)
    once, often = (
        draw_counts(probabilities, np.full(4000, 60), np.random.default_rng(1), repeat=repeat) for repeat in (1, 6)
    )
    # 10 different tokens, each six times: 36 times the variance of 10 tokens is 6 times that of 60
    assert float(often.var(axis=0).sum() / once.var(axis=0).sum()) == pytest.approx(6, rel=0.1)
    assert np.abs(often.mean(axis=0) / 60 - probabilities[0]).max() < 0.02


# --- requests ------------------------------------------------------------------------------------------------------

STILL = replace(RECIPE, spread=replace(RECIPE.spread, request=0, phase=0), output_tokens=4001)
"""Requests of one topic differ by what their tokens happen to choose, and by nothing else."""


def test_a_seed_gives_the_same_bytes():
    assert make_trace(RECIPE, GEOMETRY, 20, seed=3).digest() == make_trace(RECIPE, GEOMETRY, 20, seed=3).digest()
    assert make_trace(RECIPE, GEOMETRY, 20, seed=3).digest() != make_trace(RECIPE, GEOMETRY, 20, seed=4).digest()


def test_samples_of_a_seed_are_other_requests_of_the_same_model():
    first, second = (make_trace(STILL, GEOMETRY, 30, seed=3, sample=sample) for sample in (0, 1))
    assert not set(first.prompt_hashes) & set(second.prompt_hashes)
    assert first.labels != second.labels
    same = [[i for i, label in enumerate(trace.labels) if label == "b"] for trace in (first, second)]
    assert cosine(first.decode[same[0][0]], second.decode[same[1][0]]) > 0.99


def test_another_mix_changes_no_domain():
    mixed = make_trace(STILL.mixed({"b": 1.0}), GEOMETRY, 5, seed=3)
    assert set(mixed.labels) == {"b"}
    whole = make_trace(STILL, GEOMETRY, 30, seed=3)
    assert cosine(mixed.decode[0], whole.decode[whole.labels.index("b")]) > 0.99


def test_a_mix_keeps_the_shares_of_topics_within_a_domain():
    mixed = RECIPE.mixed({"a": 2.0, "b": 2.0})
    assert [topic.share for topic in mixed.topics] == [1.5, 0.5, 2.0]


def test_topics_of_one_name_like_the_same_experts_in_every_domain():
    topics = (Topic("a", "t", 1), Topic("b", "t", 1))
    made = make_trace(replace(STILL, spread=Spread(0, 0, 1, 0, 0), topics=topics), GEOMETRY, 20, seed=0)
    assert set(made.labels) == {"a", "b"}
    assert min(cosine(made.decode[0], row) for row in made.decode) > 0.99


def test_requests_of_a_domain_are_nearer_to_one_another_than_to_others():
    made = make_trace(RECIPE, GEOMETRY, 60, seed=0)
    of = {name: [i for i, label in enumerate(made.labels) if label == name] for name in "ab"}
    within = cosine(made.decode[of["b"][0]], made.decode[of["b"][1]])
    across = cosine(made.decode[of["b"][0]], made.decode[of["a"][0]])
    assert within > across + 0.2


def test_a_phase_part_sets_prefill_and_decode_apart():
    long = replace(RECIPE, prompts=Lengths(1000, 0.1), output_tokens=1001)
    apart, same = (
        make_trace(replace(long, spread=replace(long.spread, phase=phase)), GEOMETRY, 5, seed=0) for phase in (1.0, 0.0)
    )
    assert cosine(same.prefill[0], same.decode[0]) > 0.98
    assert 0.4 < cosine(apart.prefill[0], apart.decode[0]) < 0.95


def test_a_trace_is_a_workload_with_outputs_of_the_length_that_was_asked_for():
    trace = make_trace(replace(RECIPE, output_tokens=40), GEOMETRY, 12, seed=0)
    population = population_of(trace)
    assert tuple(request.domain for request in population.requests) == trace.labels
    assert {request.output_tokens for request in population.requests} == {40}
    assert (trace.decode_covered == 39).all()


def test_prompts_are_as_long_as_they_may_be():
    short = replace(RECIPE, prompts=Lengths(10, 2.0, least=4, most=20))
    made = make_trace(short, GEOMETRY, 200, seed=0)
    assert (made.prefill_tokens.min(), made.prefill_tokens.max()) == (4, 20)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_spread_is_finite_and_not_negative(value):
    with pytest.raises(InputError, match="topic must be finite and not negative"):
        Spread(1, 1, value, 1, 1)


def test_a_recipe_needs_topics_with_shares():
    with pytest.raises(InputError, match="no topics"):
        replace(RECIPE, topics=())
    with pytest.raises(InputError, match="share of a/t must be above 0, got 0"):
        replace(RECIPE, topics=(Topic("a", "t", 0),))


@pytest.mark.parametrize("wrong", [{"output_tokens": 1}, {"repeat": 0.5}, {"repeat": float("nan")}])
def test_a_recipe_needs_outputs_and_tokens_that_choose_at_least_for_themselves(wrong):
    with pytest.raises(InputError, match=r"output tokens \(2 or more\), repeat"):
        replace(RECIPE, **wrong)


def test_a_mix_names_domains_that_there_are():
    with pytest.raises(InputError, match="no domain 'c'; there are a, b"):
        RECIPE.mixed({"a": 1, "c": 1})


def test_tokens_must_have_a_choice():
    with pytest.raises(InputError, match="fewer than all experts"):
        make_trace(RECIPE, ModelGeometry(1, 4, 4), 3, seed=0)
    with pytest.raises(InputError, match="0 requests"):
        make_trace(RECIPE, GEOMETRY, 0, seed=0)
