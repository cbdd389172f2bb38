from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bare_profiles import bare_profile
from coterie.core import ExpertCounts, ModelGeometry, RouteRequest, WorkerState
from coterie.errors import ConfigError, ProfileError
from coterie.routing import Locality, Reads, route
from coterie.signature import SignatureTransform

GEOMETRY = ModelGeometry(layers=1, experts=4, top_k=1)
RNG = np.random.default_rng(0)
FOUR = tuple(WorkerState(name, name) for name in "abcd")


def profile(clusters=4, idf=(1, 1, 1, 1)):
    """Centroid k is the axis of expert k."""
    transform = SignatureTransform(GEOMETRY, (0,), idf=np.array([idf], np.float32))
    return bare_profile(transform, np.eye(4, dtype=np.float32)[:clusters])


def request(*counts, covered=None, geometry=GEOMETRY):
    tokens = sum(counts)
    return RouteRequest("r", counts=ExpertCounts(geometry, np.array([counts], np.uint8), tokens, covered or tokens))


def loads(*requests):
    return [structs.replace(worker, requests=n) for worker, n in zip(FOUR, requests, strict=True)]


def choose(request, workers=FOUR, tau=0.1, targets=FOUR, of=None):
    return Locality(of or profile(), targets, tau).choose(request, workers, RNG)


# --- the band -----------------------------------------------------------------------------------------


def test_the_nearest_group_is_chosen_whatever_its_load():
    # signature (0.8, 0.6, 0, 0): group b is 0.2 below a, outside the band of 0.1
    decision = choose(request(4, 3, 0, 0), loads(50, 0, 0, 0))
    assert decision.worker == "a"
    assert decision.reason == "locality band"
    assert decision.candidates == ("a",)
    assert [name for name, _ in decision.scores] == ["a", "b", "c", "d"]
    np.testing.assert_allclose([score for _, score in decision.scores], [0.8, 0.6, 0, 0], rtol=1e-6)


def test_load_decides_inside_the_band():
    decision = choose(request(4, 3, 0, 0), loads(3, 2, 0, 0), tau=0.25)
    assert (decision.worker, decision.candidates) == ("b", ("a", "b"))


def test_equal_loads_go_to_the_least_recently_assigned():
    a, b, c, d = FOUR
    used = [structs.replace(a, assigned=7), structs.replace(b, assigned=5), c, d]
    assert choose(request(4, 3, 0, 0), used, tau=0.25).worker == "b"


def test_tau_zero_keeps_exact_ties():
    decision = choose(request(5, 5, 0, 0), loads(1, 0, 0, 0), tau=0)
    assert (decision.worker, decision.candidates) == ("b", ("a", "b"))


def test_tau_two_is_least_load():
    assert choose(request(9, 0, 0, 0), loads(1, 2, 3, 0), tau=2).worker == "d"


def test_a_group_without_available_worker_is_no_candidate():
    a, b, c, d = FOUR
    policy = Locality(profile(), FOUR)
    decision = route(policy, request(4, 3, 0, 0), [structs.replace(a, available=False), b, c, d], RNG)
    assert (decision.worker, decision.reason) == ("b", "locality band")
    assert "a" not in dict(decision.scores)


def test_locality_picks_the_group_and_load_the_rank():
    ranks = [WorkerState(f"{group}{rank}", group, rank) for group in "abcd" for rank in range(2)]
    busy = [structs.replace(worker, requests=n) for worker, n in zip(ranks, [6, 5, 0, 0, 0, 0, 0, 0], strict=True)]
    decision = choose(request(9, 0, 0, 0), busy, targets=ranks)
    assert (decision.worker, decision.candidates) == ("a1", ("a0", "a1"))


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any),
    st.permutations(range(4)),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_the_order_in_which_workers_are_listed_does_not_matter(counts, order, requests):
    workers = loads(*requests)
    one, other = choose(request(*counts)), choose(request(*counts), [FOUR[i] for i in order])
    assert one.worker == other.worker
    assert dict(one.scores) == dict(other.scores)
    assert choose(request(*counts), workers).worker == choose(request(*counts), [workers[i] for i in order]).worker


def test_a_permutation_of_the_targets_permutes_the_answer():
    for order in permutations(range(4)):
        targets = [FOUR[i] for i in order]
        assert choose(request(0, 0, 9, 0), targets=targets).worker == targets[2].name  # centroid 2's group


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), st.floats(0, 2))
def test_the_choice_equals_the_rule_written_out(counts, tau):
    workers = loads(3, 1, 4, 1)
    signature = np.array(counts, np.float32) / np.float32(np.sqrt(np.float32(sum(n * n for n in counts))))
    best = max(signature)
    band = [worker for worker, score in zip(workers, signature, strict=True) if float(score) >= float(best) - tau]
    expected = min(band, key=lambda worker: (worker.requests, worker.name)).name
    assert choose(request(*counts), workers, tau).worker == expected


# --- fallbacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reason", "detail"),
    [
        (RouteRequest("r"), "load only: no counts", ""),
        (RouteRequest("r", counts_problem="plugin missing"), "load only: no counts", "plugin missing"),
        (
            RouteRequest("r", counts=ExpertCounts(GEOMETRY, np.array([[1, 2, 0, 0]], np.uint8), tokens=9, covered=3)),
            "load only: partial counts",
            "3 of 9 prompt tokens",
        ),
        (
            request(1, 1, geometry=ModelGeometry(1, 2, 1)),
            "load only: other geometry",
            "1 layers x 2 experts, top-1; profile: 1 layers x 4 experts, top-1",
        ),
        (request(0, 0, 0, 9), "load only: zero signature", ""),
    ],
)
def test_without_a_usable_signal_load_decides_and_says_why(asked, reason, detail):
    decision = choose(asked, loads(3, 2, 0, 1), of=profile(idf=(1, 1, 1, 0)))
    assert (decision.worker, decision.reason, decision.detail) == ("c", reason, detail)
    assert decision.scores == ()


def test_another_top_k_is_another_geometry():
    counts = ExpertCounts(ModelGeometry(1, 4, 2), np.array([[2, 2, 0, 0]], np.uint8), 2, 2)
    assert choose(RouteRequest("r", counts=counts)).reason == "load only: other geometry"


# --- construction -------------------------------------------------------------------------------------


def test_a_profile_for_another_number_of_groups_is_refused_with_the_remedy():
    with pytest.raises(
        ProfileError,
        match=r"3 centroids for 4 decode groups; fit it again with `coterie fit --clusters 4`.*--on-mismatch load",
    ):
        Locality(profile(3), FOUR)


def test_a_profile_of_what_engines_do_not_report_is_refused_with_the_remedy():
    of_gates = replace(profile(), transform=SignatureTransform(GEOMETRY, (0,), "gate_prob"))
    with pytest.raises(
        ProfileError, match=r"made of gate_prob, and engines report only counts; .*--transform count_idf"
    ):
        Locality(of_gates, FOUR)


@pytest.mark.parametrize("kind", ["count", "sqrt", "binary"])
def test_every_signature_of_counts_can_be_routed_by(kind):
    of_counts = replace(profile(), transform=SignatureTransform(GEOMETRY, (0,), kind))
    assert choose(request(9, 1, 0, 0), of=of_counts, tau=0.01).candidates[0] == "a"


def test_ranks_of_one_group_count_as_one():
    ranks = [WorkerState(f"{group}{rank}", group, rank) for group in "abc" for rank in range(2)]
    assert Locality(profile(3), ranks).name == "locality"


@pytest.mark.parametrize("tau", [-0.1, 2.1, float("nan"), float("inf")])
def test_tau_out_of_range_is_refused(tau):
    with pytest.raises(ConfigError, match="tau must be from 0 to 2"):
        Locality(profile(), FOUR, tau)


def test_it_asks_for_counts_alone():
    assert Locality(profile(), FOUR).reads == {Reads.COUNTS}
