from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.analysis import active as module
from coterie.analysis.active import DecodeUse
from coterie.core import ModelGeometry
from coterie.errors import InputError
from coterie.wire import count_ids
from traces import random_ids


def use_of(ids_by_request, experts, *, with_ids=True):
    """What requests used, from `[tokens, L, k]` ids of each."""
    counts = np.stack([count_ids(ids, experts) for ids in ids_by_request])
    tokens = np.array([len(ids) for ids in ids_by_request])
    return DecodeUse(counts, tokens, np.concatenate(ids_by_request) if with_ids else None)


def one_layer(rows):
    """`[tokens, 1, k]` ids."""
    return np.array(rows, dtype=np.uint8)[:, None]


def test_a_batch_activates_the_union_of_its_requests_at_the_same_step():
    # step 0: {0, 1} and {1, 2} make 3; step 1: {0, 3} and {0, 3} make 2; mean 2.5
    use = use_of([one_layer([[0, 1], [0, 3]]), one_layer([[1, 2], [3, 0]])], experts=5)
    assert use.method == "replayed"
    assert use.active([np.array([0, 1]), np.array([1])]).tolist() == [[2.5], [2.0]]


def test_a_shorter_output_starts_over():
    # outputs 0 1 2 and 3 4: steps (0, 3) (1, 4) (2, 3), each of 2 experts
    use = use_of([one_layer([[0], [1], [2]]), one_layer([[3], [4]])], experts=5)
    assert use.active([np.array([0, 1])]).tolist() == [[2.0]]
    # outputs 0 1 2 and 0 2: steps (0, 0) (1, 2) (2, 0): 1, 2 and 2 experts
    use = use_of([one_layer([[0], [1], [2]]), one_layer([[0], [2]])], experts=5)
    assert use.active([np.array([0, 1])]).tolist() == [[pytest.approx(5 / 3)]]


def test_without_ids_the_union_is_expected_from_the_counts():
    # expert 0: 1 - (1 - 1/2)(1 - 1) = 1; expert 1: 1 - (1/2)(1) = 1/2; together 1.5
    use = use_of([one_layer([[0], [1]]), one_layer([[0], [0]])], experts=3, with_ids=False)
    assert use.method == "expected"
    assert use.active([np.array([0, 1])]).tolist() == [[pytest.approx(1.5)]]


shapes = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 3))


@given(st.integers(0, 2**32 - 1), shapes)
def test_replaying_is_counting_sets(seed, shape):
    rng = np.random.default_rng(seed)
    L, E, k = shape[0], shape[1], min(shape[1], shape[2])
    outputs = [random_ids(rng, int(tokens), ModelGeometry(L, E, k)) for tokens in rng.integers(1, 6, 5)]
    batch = rng.permutation(5)[:3]
    steps = max(len(ids) for ids in outputs)
    expected = [
        np.mean([len({int(e) for i in batch for e in outputs[i][t % len(outputs[i]), layer]}) for t in range(steps)])
        for layer in range(L)
    ]
    assert use_of(outputs, E).active([batch])[0] == pytest.approx(expected)


@given(st.integers(0, 2**32 - 1))
def test_the_expectation_is_the_mean_over_all_combinations_of_steps(seed):
    rng = np.random.default_rng(seed)
    outputs = [random_ids(rng, int(tokens), ModelGeometry(2, 5, 2)) for tokens in rng.integers(1, 5, 3)]
    combinations = list(product(*(range(len(ids)) for ids in outputs)))
    expected = [
        np.mean([len({int(e) for i, t in enumerate(steps) for e in outputs[i][t, layer]}) for steps in combinations])
        for layer in range(2)
    ]
    found = use_of(outputs, 5, with_ids=False).active([np.arange(3)])[0]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("with_ids", [True, False])
def test_taking_one_layer_at_a_time_changes_nothing(with_ids, monkeypatch):
    rng = np.random.default_rng(3)
    outputs = [random_ids(rng, 4, ModelGeometry(5, 9, 3)) for _ in range(6)]
    use, batches = use_of(outputs, 9, with_ids=with_ids), [np.arange(4), np.arange(2, 6)]
    found = use.active(batches)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 1)
    assert np.array_equal(use.active(batches), found)


def test_ids_beyond_a_byte_are_told_apart():
    ids = [np.array([[[0, 300]]], dtype=np.uint16), np.array([[[44, 511]]], dtype=np.uint16)]  # 300 is 44 in a byte
    assert use_of(ids, 512).active([np.array([0, 1])]).tolist() == [[4.0]]


def test_a_long_output_is_replayed_for_so_many_steps_and_no_more(monkeypatch):
    monkeypatch.setattr(module, "MOST_STEPS", 2)
    use = use_of([one_layer([[0, 1], [0, 1], [0, 2]]), one_layer([[0, 1], [0, 1], [3, 4]])], experts=5)
    assert use.active([np.array([0, 1])]).tolist() == [[2.0]]


def test_requests_without_output_and_shapes_that_do_not_belong_together_are_refused():
    ids = one_layer([[0, 1]])
    counts = count_ids(ids, 3)[None]
    with pytest.raises(InputError, match="request 1 has no counted output token"):
        DecodeUse(np.concatenate([counts, counts * 0]), np.array([1, 0]))
    with pytest.raises(InputError, match="counts"):
        DecodeUse(counts, np.array([1, 1]))
    with pytest.raises(InputError, match="ids"):
        DecodeUse(counts, np.array([1]), np.concatenate([ids, ids]))
    for beyond in (ids + np.uint8(2), ids.astype(np.int8) - 1):
        with pytest.raises(InputError, match=r"an id outside 0\.\.2"):
            DecodeUse(counts, np.array([1]), beyond)
    with pytest.raises(InputError, match="more often than it has tokens"):
        DecodeUse(counts * 2, np.array([1]))
