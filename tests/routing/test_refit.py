"""The state machine of refits, driven by hand."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from bare_profiles import bare_profile
from coterie.clock import ManualClock
from coterie.core import ExpertCounts, ModelGeometry, RouteRequest, WorkerState
from coterie.errors import ConfigError, ProfileError
from coterie.routing import Background, Ledger, LocalityRefit, Shown, Watcher, route
from coterie.routing.refit import Window
from coterie.signature import SignatureTransform

GEOMETRY = ModelGeometry(layers=1, experts=8, top_k=1)
RNG = np.random.default_rng(0)


def profile(clusters):
    """Centroid k is the axis of expert k."""
    transform = SignatureTransform(GEOMETRY, (0,), idf=np.ones((1, 8), np.float32))
    return bare_profile(transform, np.eye(8, dtype=np.float32)[:clusters])


def asking(expert, other=None, share=0):
    """100 tokens, most of which choose one expert."""
    counts = np.zeros((1, 8), np.uint8)
    counts[0, expert] = 100 - share
    if share:
        counts[0, other] = share
    return RouteRequest("r", counts=ExpertCounts(GEOMETRY, counts, 100, 100))


class Pool:
    """A policy under a ledger, and a clock that is moved by hand."""

    def __init__(self, groups="ab", clusters=None, window_s=4.0):
        self.clock = ManualClock()
        targets = [WorkerState(name, name) for name in groups]
        self.policy = LocalityRefit(profile(clusters or len(groups)), targets, window_s=window_s)
        self.ledger = Ledger(targets, self.clock)
        self.ledger.follow(self.policy)

    def send(self, *experts):
        for expert in experts:
            request = asking(expert)
            self.ledger.lease(self.decide(request).worker, request).release()

    def decide(self, request):
        return route(self.policy, request, self.ledger.states(), RNG)

    def owner(self, expert):
        return self.decide(asking(expert)).worker

    def due(self, after_s=0.0):
        self.clock.advance(after_s)
        return self.policy.due(self.ledger.states(), self.clock.now())

    def install(self, outcome):
        self.policy.install(outcome, self.clock.now())

    def refit(self, after_s=0.0):
        job = self.due(after_s)
        assert job is not None
        self.install(job.run())

    def figure(self, name):
        return self.policy.figures(self.clock.now()).get(name)


def test_it_is_a_watcher_with_work_and_figures():
    assert all(isinstance(Pool().policy, protocol) for protocol in (Watcher, Background, Shown))


# --- refits -------------------------------------------------------------------------------------------


def test_traffic_that_the_profile_knows_changes_nothing():
    pool = Pool()
    pool.send(*[0, 1] * 20)
    pool.refit()
    assert pool.figure("refits_no_gain_total") == 1
    assert pool.figure("refits_installed_total") == 0
    assert (pool.owner(0), pool.owner(1)) == ("a", "b")


def test_new_traffic_moves_the_centroids_and_each_group_gets_the_one_most_like_its_own():
    pool = Pool()
    pool.send(*[0, 2] * 20)  # a keeps what it had, b gets what is new
    assert pool.owner(2) == "a"  # like neither: least load, least recently assigned
    pool.refit()
    assert (pool.owner(0), pool.owner(2)) == ("a", "b")
    assert pool.figure("refits_installed_total") == 1
    assert pool.figure("refit_gain") > 3 * pool.figure("refit_gain_error")


def test_traffic_of_one_topic_is_divided_where_one_group_had_all():
    pool = Pool()
    for i in range(32):
        pool.ledger.lease("a", asking(0, 2 + i % 2, 35 + i // 2)).release()
    assert [pool.decide(asking(0, other, 45)).candidates for other in (2, 3)] == [("a",), ("a",)]
    pool.refit()
    assert {pool.decide(asking(0, other, 45)).candidates for other in (2, 3)} == {("a",), ("b",)}


def test_nothing_is_done_before_eight_requests_of_each_centroid():
    pool = Pool()
    pool.send(*[0] * 15)
    assert pool.due() is None
    pool.send(0)
    assert pool.due() is not None


def test_a_refit_is_due_every_half_window_if_there_are_new_requests():
    pool = Pool(window_s=4)
    pool.send(*[0, 1] * 8)
    pool.refit()
    pool.send(0)
    assert pool.due(1.9) is None
    assert pool.due(0.2) is not None


def test_without_new_requests_no_refit_is_due():
    pool = Pool()
    pool.send(*[0, 1] * 8)
    pool.refit()
    assert pool.due(60) is None


def test_one_job_at_a_time():
    pool = Pool()
    pool.send(*[0, 1] * 8)
    job = pool.due()
    pool.send(0)
    assert pool.due(60) is None
    pool.install(job.run())
    assert pool.due() is not None


def test_a_job_can_be_run_twice_and_changes_nothing_by_itself():
    pool = Pool()
    pool.send(*[0, 2] * 20)
    job = pool.due()
    once, again = job.run(), job.run()
    np.testing.assert_array_equal(once.found.centroids, again.found.centroids)
    assert pool.decide(asking(2)).candidates == ("a", "b")


def test_a_fit_that_fails_is_logged_and_counted_and_the_centroids_stay(caplog):
    pool = Pool()
    pool.send(*[0, 2] * 20)
    job = replace(pool.due(), counts=())
    with caplog.at_level(logging.ERROR):
        pool.install(job.run())
    assert "refit failed, the present centroids stay: ValueError: " in caplog.text
    assert pool.figure("refits_failed_total") == 1
    assert pool.decide(asking(2)).candidates == ("a", "b")
    pool.send(0)
    pool.refit(2)
    assert pool.owner(2) == "b"


def test_requests_without_a_usable_signal_are_not_in_the_window():
    pool = Pool()
    counts = asking(0).counts
    partial = ExpertCounts(GEOMETRY, counts.counts, 200, 100)
    other = ExpertCounts(ModelGeometry(1, 4, 1), np.array([[9, 0, 0, 0]], np.uint8), 9, 9)
    for odd in (None, partial, other):
        pool.ledger.lease("a", RouteRequest("r", counts=odd))
    assert pool.figure("refit_window_requests") == 0


def test_the_age_of_centroids_counts_from_their_installation():
    pool = Pool()
    assert pool.figure("centroids_age_seconds") is None
    pool.send(*[0, 2] * 20)
    pool.refit()
    pool.clock.advance(7)
    assert pool.figure("centroids_age_seconds") == 7


# --- the pool -----------------------------------------------------------------------------------------


def test_a_lost_groups_requests_go_to_the_next_best_at_once():
    pool = Pool("abc")
    pool.ledger.set_available("b", False)
    assert pool.decide(asking(1, 2, 30)).worker == "c"


def test_after_a_loss_the_rest_divide_what_comes_where_it_pays():
    pool = Pool("abc")
    pool.send(*[0] * 30, *[1] * 5, *[2] * 25)
    pool.refit()
    assert pool.figure("refits_installed_total") == 0
    pool.ledger.set_available("c", False)
    assert pool.decide(asking(2)).candidates == ("a", "b")  # like neither
    pool.send(2)
    pool.refit()
    assert pool.figure("refits_installed_total") == 1
    assert [pool.decide(asking(expert)).candidates for expert in (0, 1, 2)] == [("a",), ("b",), ("b",)]


def test_a_new_group_shares_the_fullest_centroid_from_its_first_moment_and_then_has_its_own():
    pool = Pool("abc")
    pool.ledger.set_available("c", False)
    assert pool.due() is None
    held = [pool.ledger.lease("a", asking(0)) for _ in range(3)]
    pool.ledger.set_available("c", True)
    assert pool.owner(0) == "a"  # nobody has been asked since: c is no candidate
    assert pool.due() is None  # too few requests for a fit
    assert pool.decide(asking(0)).candidates == ("a", "c")
    assert pool.owner(0) == "c"
    for one in held:
        one.release()
    for share in range(40):
        pool.ledger.lease("a", asking(0, 4 + share % 2, 45)).release()
    pool.send(*[1] * 20)
    pool.refit()
    assert pool.figure("refit_gain") is None  # nobody asked whether it pays
    assert pool.figure("centroids") == 3
    assert {pool.decide(asking(0, other, 45)).candidates for other in (4, 5)} == {("a",), ("c",)}
    assert pool.owner(1) == "b"


def test_when_the_pool_changes_while_a_job_runs_its_outcome_is_dropped_and_another_is_due():
    pool = Pool("abc")
    pool.send(*[0, 1, 4] * 10)
    outcome = pool.due().run()
    pool.ledger.set_available("b", False)
    assert pool.due() is None
    pool.install(outcome)
    assert pool.figure("refits_outdated_total") == 1
    pool.send(0)
    pool.refit()
    assert pool.figure("refits_outdated_total") == 1
    assert {name for name, _ in pool.decide(asking(0)).scores} == {"a", "c"}


def test_while_no_group_is_available_all_is_kept():
    pool = Pool("ab")
    pool.ledger.set_available("a", False)
    pool.ledger.set_available("b", False)
    assert pool.due() is None
    pool.ledger.set_available("a", True)
    pool.ledger.set_available("b", True)
    assert (pool.owner(0), pool.owner(1)) == ("a", "b")


def test_a_pool_of_strangers_is_routed_by_load_until_it_is_dealt_centroids():
    pool = Pool("abc")
    for name in "bc":
        pool.ledger.set_available(name, False)
    pool.due()
    pool.ledger.set_available("a", False)
    pool.ledger.set_available("b", True)
    assert pool.decide(asking(0)).reason == "load only: no centroid"
    pool.due()
    assert pool.decide(asking(0)).reason == "locality band"


def test_a_profile_of_another_number_of_centroids_is_adapted():
    pool = Pool("abcd", clusters=2)
    assert pool.decide(asking(0)).candidates == ("a", "c")
    kinds = [asking(0, 4, 45), asking(0, 5, 45), asking(1, 6, 45), asking(1, 7, 45)]
    for request in kinds * 10:
        pool.ledger.lease("a", request).release()
    pool.refit()
    assert pool.figure("centroids") == 4
    assert sorted(pool.decide(request).candidates for request in kinds) == [("a",), ("b",), ("c",), ("d",)]


def test_ranks_of_one_group_come_and_go_without_a_new_division():
    targets = [WorkerState(f"{group}{rank}", group, rank) for group in "ab" for rank in range(2)]
    policy = LocalityRefit(profile(2), targets)
    one_less = [structs.replace(targets[0], available=False), *targets[1:]]
    policy.due(one_less, 0)
    assert policy.choose(asking(0), one_less[1:], RNG).worker == "a1"


# --- construction, the window -------------------------------------------------------------------------


@pytest.mark.parametrize("window_s", [0, -1, float("inf"), float("nan")])
def test_a_window_of_no_length_is_refused(window_s):
    with pytest.raises(ConfigError, match="must be above zero seconds"):
        LocalityRefit(profile(2), [WorkerState("a", "a")], window_s=window_s)


def test_what_locality_refuses_of_a_profile_is_refused():
    of_gates = replace(profile(2), transform=SignatureTransform(GEOMETRY, (0,), "gate_prob"))
    with pytest.raises(ProfileError, match="made of gate_prob"):
        LocalityRefit(of_gates, [WorkerState("a", "a")])


def kept(window, now_s):
    found = window.take(now_s)
    return None if found is None else [int(counts[0, 0]) for counts in found]


def counts_of(number):
    return np.full((1, 1), number, np.uint32)


def test_the_window_holds_what_came_within_its_seconds():
    window = Window(seconds=5, centroids=1)
    for time_s in range(20):
        window.add(counts_of(time_s), time_s)
    assert kept(window, 17) == list(range(12, 20))
    window.add(counts_of(20), 20)
    assert kept(window, 17) == list(range(12, 21))


def test_but_at_least_eight_requests_of_each_centroid_however_old():
    window = Window(seconds=5, centroids=1)
    for number in range(10):
        window.add(counts_of(number), 0)
    assert kept(window, 1000) == list(range(2, 10))


@pytest.mark.parametrize(("centroids", "most"), [(1, 32), (16, 512), (64, 1024), (200, 1600)])
def test_and_at_most_a_bounded_number(centroids, most):
    window = Window(seconds=5, centroids=centroids)
    for number in range(2000):
        window.add(counts_of(number), 0)
    assert len(window) == most
    assert kept(window, 0)[-1] == 1999
