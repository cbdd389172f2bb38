import itertools
import math

import numpy as np
import pytest

from coterie.core import RouteRequest
from coterie.errors import InputError
from coterie.latency import StepTime
from coterie.routing import LeastLoad, RoundRobin
from coterie.sim.optimum import best_partition, count_sets
from coterie.sim.oracle import Instance, assign_by, best_found, one_by_one

STEP = StepTime(5e-3, 1e-4, 2e-4)


def random_instance(seed, requests, workers, *, online=False):
    rng = np.random.default_rng(seed)
    likes = rng.integers(2, size=requests)
    probabilities = rng.random((requests, 2, 6)) ** 4
    probabilities[likes == 0, :, :3] *= 0.05
    probabilities[likes == 1, :, 3:] *= 0.05
    begins = rng.random(requests).round(1) if online else None
    ends = begins + rng.random(requests).round(1) + 0.3 if online else None
    return Instance(probabilities, workers, STEP, begin_s=begins, end_s=ends)


def mean_tpot_by_definition(probabilities, places, begins, ends):
    """Each request's TPOT is the mean over its life of its worker's step time: looked at every 0.1 s."""
    tpots = []
    for i, place in enumerate(places):
        steps = []
        for tick in range(round(10 * begins[i]), round(10 * ends[i])):
            mates = [
                j
                for j, other in enumerate(places)
                if other == place and round(10 * begins[j]) <= tick < round(10 * ends[j])
            ]
            active = (1 - np.prod(1 - probabilities[mates], axis=0)).sum()
            steps.append(STEP.step_s(len(mates), active))
        tpots.append(np.mean(steps))
    return np.mean(tpots)


def all_assignments(instance, most):
    for places in itertools.product(range(instance.workers), repeat=len(instance)):
        if instance.heaviest(places) <= most:
            yield instance.mean_tpot_s(places)


def test_mean_tpot_is_the_mean_over_requests_of_the_mean_over_their_lives():
    probabilities = np.random.default_rng(0).random((5, 2, 4))
    begins, ends = [0, 0.2, 0.3, 0.3, 0.9], [0.5, 1.1, 0.4, 0.9, 1.0]
    places = [0, 0, 1, 0, 1]
    instance = Instance(probabilities, 2, STEP, begin_s=begins, end_s=ends)
    expected = mean_tpot_by_definition(probabilities, places, begins, ends)
    assert instance.mean_tpot_s(places) == pytest.approx(expected, rel=1e-12)
    assert instance.tpot_s(places).mean() == pytest.approx(expected, rel=1e-12)


def test_a_batch_costs_each_request_its_workers_step():
    instance = Instance(np.array([[[0.5, 0]], [[0.5, 0]], [[0, 1 - 1e-6]]]), 2, STEP)
    # worker 0: 2 requests, 1 - 0.5 * 0.5 = 0.75 experts; worker 1: 1 request, 1 - 1e-6 experts
    expected = (2 * STEP.step_s(2, 0.75) + STEP.step_s(1, 1 - 1e-6)) / 3
    assert instance.mean_tpot_s([0, 0, 1]) == pytest.approx(expected, rel=1e-12)


def test_heaviest_counts_those_that_are_there_at_once():
    instance = Instance(np.zeros((3, 1, 2)), 2, STEP, begin_s=[0, 1, 1], end_s=[1, 2, 3])
    assert instance.heaviest([0, 0, 1]) == 1
    assert instance.heaviest([0, 1, 1]) == 2


@pytest.mark.parametrize("seed", range(4))
def test_best_partition_is_the_best_of_all_assignments(seed):
    instance = random_instance(seed, requests=7, workers=3)
    known = np.arange(7) % 3
    for most in (3, 4):
        best = best_partition(instance, most, known)
        assert best.proven
        assert best.mean_tpot_s == pytest.approx(min(all_assignments(instance, most)), rel=1e-9)
        assert instance.mean_tpot_s(best.assignment) == pytest.approx(best.mean_tpot_s, rel=1e-12)
        assert instance.heaviest(best.assignment) <= most


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_that_is_found_is_the_best_of_small_cases(seed, online):
    instance = random_instance(seed, requests=6, workers=3, online=online)
    found = best_found(instance, 3, rng=np.random.default_rng(seed))
    assert instance.heaviest(found) <= 3
    assert instance.mean_tpot_s(found) == pytest.approx(min(all_assignments(instance, 3)), rel=1e-9)


def test_the_bound_holds_and_is_near_on_a_case_too_large_to_try_all():
    instance = random_instance(5, requests=16, workers=4)
    found = best_found(instance, 5, rng=np.random.default_rng(0))
    best = best_partition(instance, 5, np.arange(16) % 4)
    assert best.bound_s <= best.mean_tpot_s <= instance.mean_tpot_s(found) * (1 + 1e-9)
    assert instance.mean_tpot_s(found) < 1.005 * best.bound_s


def test_one_by_one_takes_the_least_that_each_adds_and_does_not_look_ahead():
    likes = np.eye(2)[[0, 1, 0, 1, 1]][:, None, :] * 0.9
    instance = Instance(likes, 2, STEP)
    # 0 and 1 go apart, since two in one step wait for both experts; the others go where their expert is used.
    assert one_by_one(instance, 3).tolist() == [0, 1, 0, 1, 1]
    with pytest.raises(InputError, match="finds 2 on every worker"):
        one_by_one(instance, 2)


def test_search_never_ends_worse_than_where_it_began():
    instance = random_instance(8, requests=12, workers=4, online=True)
    start = np.arange(12) % 4
    found = best_found(instance, instance.heaviest(start), starts=[start], rng=np.random.default_rng(0), tries=0)
    assert instance.mean_tpot_s(found) <= instance.mean_tpot_s(start)


def test_a_policy_sees_requests_in_order_and_their_ends():
    instance = Instance(np.full((4, 1, 2), 0.5), 2, STEP, begin_s=[0, 1, 2, 3], end_s=[9, 2, 5, 6])
    requests = [RouteRequest(str(i), output_tokens=2) for i in range(4)]
    rng = np.random.default_rng(0)
    # request 1 ends as request 2 begins, so its worker is idle again; then both have one, and 0 was used longest ago
    assert assign_by(LeastLoad(), instance, requests, rng).tolist() == [0, 1, 1, 0]
    assert assign_by(RoundRobin(), instance, requests, rng).tolist() == [0, 1, 0, 1]


class Watching(LeastLoad):
    def __init__(self):
        super().__init__()
        self.served = []

    def leased(self, lease, now_s):
        pass

    def released(self, lease, served, now_s):
        self.served.append((lease.request.id, served.step_s, now_s))


def test_a_watching_policy_is_told_the_time_that_each_token_took():
    policy = Watching()
    instance = Instance(np.full((3, 1, 2), 0.5), 1, STEP, begin_s=[0, 0, 2], end_s=[1, 2, 3])
    assign_by(policy, instance, [RouteRequest(str(i), output_tokens=3) for i in range(3)], np.random.default_rng(0))
    alone, together = STEP.step_s(1, 2 * 0.5), STEP.step_s(2, 2 * 0.75)
    assert policy.served == [
        ("0", pytest.approx(together), 1.0),
        ("1", pytest.approx((together + alone) / 2), 2.0),
    ]


def test_sets_are_counted():
    assert count_sets(6, 3) == 6 + 15 + 20
    assert count_sets(6, 6) == 2**6 - 1


def test_bad_instances_are_refused():
    fine = np.full((3, 1, 2), 0.5)
    for probabilities, workers, times in (
        (fine[0], 2, {}),
        (fine[:0], 2, {}),
        (fine, 0, {}),
        (fine * 3, 2, {}),
        (fine * math.nan, 2, {}),
        (fine, 2, {"begin_s": [0, 1]}),
        (fine, 2, {"end_s": [1, 1, 0]}),
        (fine, 2, {"end_s": [1, 1, math.inf]}),
    ):
        with pytest.raises(InputError, match="oracle"):
            Instance(probabilities, workers, STEP, **times)


def test_impossible_loads_are_refused():
    instance = random_instance(0, requests=6, workers=2)
    with pytest.raises(InputError, match="6 requests at once on 2 workers of at most 2"):
        best_found(instance, 2, rng=np.random.default_rng(0))
    with pytest.raises(InputError, match="has 4 requests on a worker, not 3"):
        best_partition(instance, 3, np.array([0, 0, 0, 0, 1, 1]))
    with pytest.raises(InputError, match="of one batch"):
        best_partition(random_instance(0, 6, 2, online=True), 6, np.zeros(6, dtype=np.int64))
    with pytest.raises(InputError, match="sets of up to 9 of 40"):
        best_partition(random_instance(0, 40, 5), 9, np.arange(40) % 5)
