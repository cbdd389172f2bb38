"""The union of a changing batch, against the union counted anew at each step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.analysis.active import DecodeUse
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.sim.experts import ExpectedExperts, ReplayedExperts, experts_of
from coterie.wire import count_ids
from made_traces import domains_differ, without_output
from traces import random_ids, tiny_moe_trace

# What happens to a batch: a number joins the request of that position, None lets the longest there leave.
HISTORIES = st.lists(st.one_of(st.integers(0, 4), st.none(), st.just("step")), max_size=40)


def made_up(geometry, lengths, seed=0):
    """Ids of each request's tokens."""
    rng = np.random.default_rng(seed)
    return [random_ids(rng, length, geometry) for length in lengths]


def replayed(geometry, ids):
    counts = np.stack([count_ids(one, geometry.experts) for one in ids])
    lengths = np.array([len(one) for one in ids])
    return ReplayedExperts(DecodeUse(counts, lengths, np.concatenate(ids)), geometry)


@pytest.mark.parametrize("experts", [7, 64, 100])  # less than a word, one word, bytes that fill no word
@settings(max_examples=40)
@given(history=HISTORIES)
def test_a_replayed_batch_counts_the_union_of_its_requests_own_tokens(experts, history):
    geometry = ModelGeometry(layers=3, experts=experts, top_k=2)
    ids = made_up(geometry, [1, 2, 3, 5, 8])
    batch = replayed(geometry, ids).batch()
    there, key = {}, 0  # key: [request, steps taken]
    for event in history:
        if isinstance(event, int):
            key += 1
            there[key] = [event, 0]
            batch.join(key, event)
        elif event is None and there:
            gone = min(there)
            del there[gone]
            batch.leave(gone)
        elif there:
            tokens = [ids[request][taken % len(ids[request])] for request, taken in there.values()]
            union = {(layer, e) for token in tokens for layer, row in enumerate(token) for e in row}
            assert batch.step() == len(union)
            for one in there.values():
                one[1] += 1
        assert len(batch) == len(there)


def test_a_replayed_batch_grows_beyond_its_first_room():
    geometry = ModelGeometry(layers=2, experts=16, top_k=1)
    batch = replayed(geometry, made_up(geometry, [4] * 5)).batch()
    for key in range(200):
        batch.join(key, key % 5)
    all_five = batch.step()
    for key in range(195):
        batch.leave(key)
    assert len(batch) == 5
    alone = replayed(geometry, made_up(geometry, [4] * 5)).batch()
    for key in range(5):
        alone.join(key, key)
    assert alone.step() == all_five


@given(history=HISTORIES)
def test_an_expected_batch_is_the_sum_over_experts_of_one_minus_the_product_of_complements(history):
    geometry = ModelGeometry(layers=2, experts=6, top_k=2)
    probabilities = np.random.default_rng(1).random((5, 2, 6)) * (np.arange(6) > 0)  # nobody uses the first expert
    batch = ExpectedExperts(probabilities, geometry).batch()
    there, key = {}, 0
    for event in history:
        if isinstance(event, int):
            key += 1
            there[key] = event
            batch.join(key, event)
        elif event is None and there:
            gone = min(there)
            del there[gone]
            batch.leave(gone)
        elif there:
            product = np.prod([1 - probabilities[request] for request in there.values()], axis=0)
            assert batch.step() == pytest.approx((1 - product).sum(), abs=1e-5)


def test_a_batch_is_exactly_what_it_was_once_those_that_came_have_left_in_whatever_order():
    geometry = ModelGeometry(layers=4, experts=32, top_k=4)
    rng = np.random.default_rng(2)
    experts = ExpectedExperts(rng.random((50, 4, 32)), geometry)
    batch = experts.batch()
    batch.join("stays", 0)
    before = batch.step()
    for _ in range(20):
        keys = rng.integers(50, size=30).tolist()
        for place, request in enumerate(keys):
            batch.join(place, request)
        for place in rng.permutation(len(keys)).tolist():
            batch.leave(place)
    assert batch.step() == before


def test_an_expert_that_is_always_used_is_active_to_within_a_millionth():
    geometry = ModelGeometry(layers=1, experts=2, top_k=1)
    batch = ExpectedExperts(np.array([[[1.0, 0.0]]]), geometry).batch()
    batch.join("a", 0)
    assert batch.step() == pytest.approx(1.0, abs=1e-6)


def test_both_ways_agree_with_the_analysis_of_a_real_trace():
    trace = tiny_moe_trace()
    members = np.arange(0, 768, 12)
    use = DecodeUse(trace.decode, trace.decode_covered, trace.decode_ids)
    for ids, whole in ((trace.decode_ids, use), (None, replace(use, ids=None))):
        batch = experts_of(replace(trace, decode_ids=ids)).batch()
        for request in members:
            batch.join(request, request)
        mean = np.mean([batch.step() for _ in range(64)])  # 64 tokens were recorded of each
        assert mean == pytest.approx(whole.active([members]).sum(), rel=1e-5)


def test_a_trace_without_outputs_is_refused_with_the_remedy():
    with pytest.raises(InputError, match="no counted output token; collect it with --max-tokens 2"):
        experts_of(without_output(domains_differ(8)))


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (np.zeros((2, 3, 4)), r"\(2, 3, 4\) are not \(N, L, E\)"),
        (np.full((2, 2, 6), 1.5), "not from 0 to 1"),
        (np.full((2, 2, 6), np.nan), "not from 0 to 1"),
    ],
)
def test_probabilities_that_are_none_are_refused(probabilities, message):
    with pytest.raises(InputError, match=message):
        ExpectedExperts(probabilities, ModelGeometry(layers=2, experts=6, top_k=2))


def test_counts_alone_cannot_be_replayed():
    geometry = ModelGeometry(layers=1, experts=2, top_k=1)
    with pytest.raises(InputError, match="no ids"):
        ReplayedExperts(DecodeUse(np.array([[[3, 0]]], np.uint8), np.array([3])), geometry)
