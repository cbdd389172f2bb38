"""Expected active experts of live batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import ExpertCounts, ModelGeometry
from coterie.routing.marginal_batches import MOST, LiveBatches, MeanUsage, row_of, usage_of

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=2)


def usage(*shares):
    return np.array(shares, dtype=np.float32)


def test_usage_is_the_share_of_tokens_and_never_quite_certain():
    counts = ExpertCounts(GEOMETRY, np.array([[4, 3, 1, 0]], dtype=np.uint16), tokens=5, covered=4)
    assert usage_of(counts).tolist() == usage(MOST, 0.75, 0.25, 0).tolist()


def test_active_experts_are_the_union_that_is_expected():
    batches = LiveBatches(["a", "b"], GEOMETRY)
    for shares in ((0.5, 0.5, 0.5, 0.5), (0.5, 0, 0.5, 1)):
        batches.join("b", row_of(np.minimum(usage(*shares), np.float32(MOST))))
    # idle: 0.25, 0.5, 0.25, 0.5 * (1 - MOST), which is next to nothing
    assert np.allclose(batches.idle[1], [0.25, 0.5, 0.25, 0], atol=2e-6)
    assert np.allclose(batches.active, [0, 3], atol=1e-5)
    assert batches.requests.tolist() == [0, 2]
    # of a new one with 0.5 everywhere: 0.125 + 0.25 + 0.125 + 0
    assert np.allclose(batches.added(usage(0.5, 0.5, 0.5, 0.5)), [2, 0.5], atol=1e-5)


shares = st.lists(st.integers(0, 1000).map(lambda n: min(n / 1000, MOST)), min_size=4, max_size=4)


@given(st.lists(st.tuples(st.sampled_from("ab"), shares, st.booleans()), max_size=30), st.randoms())
def test_after_any_joins_and_leaves_all_is_as_computed_anew_from_those_present(requests, random):
    batches = LiveBatches("ab", GEOMETRY)
    rows = [(group, row_of(usage(*one)), stays) for group, one, stays in requests]
    leaving = []
    for group, row, stays in rows:
        batches.join(group, row)
        if not stays:
            leaving.append((group, row))
        if leaving and random.random() < 0.3:
            batches.leave(*leaving.pop(random.randrange(len(leaving))))
    random.shuffle(leaving)
    for group, row in leaving:
        batches.leave(group, row)
    for g, name in enumerate("ab"):
        present = [usage(*one) for group, one, stays in requests if group == name and stays]
        idle = np.prod([1 - one for one in present], axis=0, dtype=np.float64) if present else np.ones(4)
        assert np.allclose(batches.idle[g], idle, rtol=3e-5, atol=1e-30)  # 30 roundings of 2^-21, and float32's own
        assert np.isclose(batches.active[g], 4 - idle.sum(), atol=2e-5)
        assert batches.requests[g] == len(present)


def test_a_batch_that_has_emptied_is_as_new_to_the_last_bit():
    batches = LiveBatches("a", GEOMETRY)
    rows = [row_of(np.random.default_rng(i).random(4, dtype=np.float32) * np.float32(MOST)) for i in range(300)]
    for row in rows:
        batches.join("a", row)
    for row in reversed(rows):
        batches.leave("a", row)
    assert batches.idle.tolist() == [[1, 1, 1, 1]]
    assert batches.active.tolist() == [0]


def test_mean_usage_is_the_mean_of_all_that_were_counted():
    mean = MeanUsage()
    assert mean.value is None
    for shares in ((1, 0, 1, 0), (0, 0, 1, 1), (0.5, 0, 1, 0.5)):
        mean.add(usage(*shares))
    assert np.allclose(mean.value, [0.5, 0, 1, 0.5])
