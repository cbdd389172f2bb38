import numpy as np
import pytest

from coterie.analysis.active import DecodeUse
from coterie.analysis.batches import active_experts
from coterie.errors import InputError


def rng():
    return np.random.default_rng(0)


def owners(numbers, experts):
    """Requests that use one expert each, in one layer."""
    ids = np.array(numbers, dtype=np.uint8)[:, None, None]
    counts = np.eye(experts, dtype=np.uint8)[ids[:, 0]]
    return DecodeUse(counts, np.ones(len(numbers), dtype=np.int64), ids)


class Sums:
    """Stands in for `DecodeUse`: a batch activates the sum of its requests' numbers."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.batches = []

    def active(self, batches):
        self.batches = batches
        return np.array([[self.numbers[batch].sum()] for batch in batches])


def by_cell(found):
    return {(one.placement, one.batch): one for one in found}


def test_requests_with_experts_of_their_own_activate_as_many_as_there_are():
    found = active_experts(owners(range(9), 9), {"random": {"all": np.arange(9)}}, rng(), sizes=(2, 8))
    assert [one.active.value for one in found] == [2, 8]
    assert [one.active.low for one in found] == [2, 8]  # all batches are alike
    assert all(one.reduction is None for one in found)


def test_batches_of_one_domain_need_its_one_expert():
    # two domains of 10 with one expert each; random pairs are of two domains in 10/19 of all cases
    use = owners([0] * 10 + [1] * 10, 2)
    placements = {"random": {"all": np.arange(20)}, "domain": {"a": np.arange(10), "b": np.arange(10, 20)}}
    cells = by_cell(active_experts(use, placements, rng(), sizes=(2,), draws=2000))
    random, domain = cells["random", 2], cells["domain", 2]
    assert domain.active.value == 1
    assert random.active.low < 1 + 10 / 19 < random.active.high
    assert domain.reduction.value == pytest.approx(1 - 1 / random.active.value)
    # the domain's mean is exact, so that only the random one has an error
    assert domain.reduction.high - domain.reduction.low == pytest.approx(
        (random.active.high - random.active.low) / random.active.value**2
    )


def test_a_batch_holds_different_requests_of_one_pool():
    use = Sums(np.arange(30))
    active_experts(use, {"random": {"all": np.arange(30)}, "domain": {"a": np.arange(12)}}, rng(), sizes=(8,), draws=50)
    assert len(use.batches) == 100
    assert all(len(set(batch.tolist())) == 8 for batch in use.batches)
    assert all(batch.max() < 12 for batch in use.batches[50:])


def test_a_pool_must_have_more_requests_than_a_batch_and_its_lack_is_told():
    placements = {"random": {"all": np.arange(20)}, "domain": {"small": np.arange(8), "large": np.arange(8, 20)}}
    cells = by_cell(active_experts(Sums(np.ones(20)), placements, rng(), sizes=(8, 32)))
    domain = cells["domain", 8]
    assert domain.reason == "1 of 2 domains have not more than 8 requests"
    assert domain.coverage == pytest.approx(12 / 20)
    assert [(pool.pool, pool.requests, pool.active is None) for pool in domain.pools] == [
        ("small", 8, True),
        ("large", 12, False),
    ]
    assert (cells["random", 32].active, cells["random", 32].reason) == (
        None,
        "a batch of 32 needs more than 32 requests",
    )
    assert (cells["domain", 32].active, cells["domain", 32].reduction, cells["domain", 32].coverage) == (None, None, 0)


def test_pools_count_by_their_requests():
    # pools of 30 ones and of 10 fives: (30 * 1 + 10 * 5) / 40 = 2 for a batch of 1
    numbers = np.array([1.0] * 30 + [5.0] * 10)
    placements = {
        "random": {"all": np.arange(40)},
        "cluster": {"0": np.arange(30), "1": np.arange(30, 40), "2": np.arange(0)},
    }
    cluster = by_cell(active_experts(Sums(numbers), placements, rng(), sizes=(1,)))["cluster", 1]
    assert cluster.active.value == 2


def test_the_interval_of_a_sum_is_that_of_sampling_theory():
    # batches of 4 of 40 requests: the mean of all batches is 4 times the mean of 40, with error 4 s / sqrt(40)
    numbers = rng().normal(10, 1, 40)
    (found,) = active_experts(Sums(numbers), {"random": {"all": np.arange(40)}}, rng(), sizes=(4,), draws=5000)
    error = 4 * numbers.std(ddof=1) / np.sqrt(40)
    assert found.active.high - found.active.value == pytest.approx(1.96 * error, rel=0.05)


def test_the_same_seed_gives_the_same_numbers():
    use, placements = owners([0, 1, 2] * 5, 3), {"random": {"all": np.arange(15)}}
    assert active_experts(use, placements, rng()) == active_experts(use, placements, rng())


@pytest.mark.parametrize(("placements", "draws"), [({"domain": {}}, 10), ({"random": {"all": np.arange(3)}}, 1)])
def test_random_batches_and_two_draws_are_needed(placements, draws):
    with pytest.raises(InputError, match="active experts"):
        active_experts(Sums(np.ones(3)), placements, rng(), draws=draws)


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="a batch of 0 requests"):
        active_experts(Sums(np.ones(3)), {"random": {"all": np.arange(3)}}, rng(), sizes=(8, 0))
