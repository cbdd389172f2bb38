"""Expected active experts of live batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import ExpertCounts, ModelGeometry
from coterie.counting import KERNEL
from coterie.routing.marginal_batches import MOST, LiveBatches, MeanUsage, usage_of

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=2)


def usage(*shares):
    return np.array(shares, dtype=np.float32)


def test_usage_is_the_share_of_tokens_and_never_quite_certain():
    counts = ExpertCounts(GEOMETRY, np.array([[4, 3, 1, 0]], dtype=np.uint16), tokens=5, covered=4)
    assert usage_of(counts).tolist() == usage(MOST, 0.75, 0.25, 0).tolist()


def join(batches, group, *shares):
    return batches.join(group, usage(*shares))


def test_active_experts_are_the_union_that_is_expected():
    batches = LiveBatches(["a", "b"], GEOMETRY)
    join(batches, "b", 0.5, 0.5, 0.5, 0.5)
    join(batches, "b", 0.5, 0, 0.5, MOST)
    # idle: 0.25, 0.5, 0.25, 0.5 * (1 - MOST), which is next to nothing
    assert np.allclose(batches.active, [0, 3], atol=1e-5)
    assert batches.requests == [0, 2]


def test_what_is_added_is_asked_of_a_batch_of_the_mean_size_composed_alike():
    batches = LiveBatches(["a", "b"], GEOMETRY)
    join(batches, "b", 0.5, 0, 0.5, 0)
    # the last requests at b, of which two count: three times the same, so idle is 0.5^load where it is used
    assert np.allclose(batches.added(usage(0.5, 0.5, 0, 0), load=2), [1, 0.5 * 0.25 + 0.5], atol=1e-5)
    assert np.allclose(batches.added(usage(0.5, 0.5, 0, 0), load=4), [1, 0.5 * 0.0625 + 0.5], atol=1e-5)


def test_a_batch_of_which_all_have_left_is_taken_for_what_it_was():
    batches = LiveBatches(["a", "b"], GEOMETRY)
    batches.leave("b", join(batches, "b", 0.5, 0, 0.5, 0))
    assert batches.active == [0, 0]
    assert np.allclose(batches.added(usage(0.5, 0.5, 0, 0), load=2), [1, 0.5 * 0.25 + 0.5], atol=1e-5)


def test_a_load_within_a_sixteenth_of_an_earlier_one_is_taken_for_it():
    batches = LiveBatches(["a"], GEOMETRY)
    join(batches, "a", 0.5, 0, 0.5, 0)
    asked = usage(0.5, 0.5, 0, 0)
    assert batches.added(asked, load=16).tolist() == batches.added(asked, load=17).tolist()
    assert batches.added(asked, load=16).tolist() != batches.added(asked, load=18).tolist()


shares = st.lists(st.integers(0, 1000).map(lambda n: min(n / 1000, MOST)), min_size=4, max_size=4)


@given(st.lists(st.tuples(st.sampled_from("ab"), shares, st.booleans()), max_size=30), st.randoms())
def test_after_any_joins_and_leaves_all_is_as_computed_anew_from_those_present(requests, random):
    batches = LiveBatches("ab", GEOMETRY)
    leaving = []
    for group, one, stays in requests:
        row = join(batches, group, *one)
        if not stays:
            leaving.append((group, row))
        if leaving and random.random() < 0.3:
            batches.leave(*leaving.pop(random.randrange(len(leaving))))
    random.shuffle(leaving)
    for group, row in leaving:
        batches.leave(group, row)
    for g, name in enumerate("ab"):
        came = [usage(*one) for group, one, _ in requests if group == name]
        present = [usage(*one) for group, one, stays in requests if group == name and stays]
        idle = np.prod([1 - one for one in present], axis=0, dtype=np.float64) if present else np.ones(4)
        before = 1 - np.mean(came, axis=0, dtype=np.float64) if came else np.ones(4)
        assert np.isclose(batches.active[g], 4 - idle.sum(), atol=2e-5)
        assert batches.requests[g] == len(present)
        alike = (idle * before**2) ** (3 / (len(present) + 2))
        assert np.isclose(batches.added(usage(0.5, 0.5, 0.5, 0.5), load=3)[g], alike.sum() / 2, atol=1e-4)


def test_a_batch_that_has_emptied_activates_nothing_to_the_last_bit():
    batches = LiveBatches("a", GEOMETRY)
    rows = [join(batches, "a", *np.random.default_rng(i).random(4) * MOST) for i in range(300)]
    for row in reversed(rows):
        batches.leave("a", row)
    assert batches.active == [0]


def test_mean_usage_is_the_mean_of_all_that_were_counted_and_then_of_the_last():
    mean = MeanUsage(4, requests=2)
    for one in ((1, 0, 1, 0), (0, 0, 1, 1)):
        mean.add(usage(*one))
    assert np.allclose(mean.value, [0.5, 0, 1, 0.5])
    mean.add(usage(0.5, 1, 1, 0.5))
    assert np.allclose(mean.value, [0.5, 0.5, 1, 0.5])


class Heard:
    """Others who have requests of their own, and what they were told."""

    def __init__(self):
        self.news, self.told = [], []

    def show(self, group, row, sign):
        self.told.append((group, row.tolist(), sign))

    def changed(self):
        news, self.news = self.news, []
        return news


def test_batches_are_the_same_whoever_holds_a_request_once_it_is_taken_in():
    others = Heard()
    mine, alone = LiveBatches(["a", "b"], GEOMETRY, others), LiveBatches(["a", "b"], GEOMETRY)
    row, more = join(mine, "b", 0.5, 0, 0.5, 0), KERNEL.row(usage(0.25, 0.5, 0, 0))
    join(alone, "b", 0.5, 0, 0.5, 0)
    others.news = [(1, 2, 2 * more.astype(np.int64))]
    assert mine.active == alone.active
    mine.take_in()
    for _ in range(2):
        join(alone, "b", 0.25, 0.5, 0, 0)
    assert mine.active == alone.active
    assert mine.requests == [0, 3]
    mine.take_in()
    mine.leave("b", row)
    assert mine.requests == [0, 2]
    assert others.told == [(1, row.tolist(), 1), (1, row.tolist(), -1)]
