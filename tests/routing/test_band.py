import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coterie.core import WorkerState
from coterie.errors import ConfigError
from coterie.routing.band import Band, adaptive_band

FOUR = tuple(WorkerState(name, name) for name in "abcd")


def scored(scores, requests):
    return [(replace(w, requests=n), s) for w, s, n in zip(FOUR, scores, requests, strict=True)]


# --- of a fixed width ---------------------------------------------------------------------------------


def test_load_decides_inside_the_band_alone():
    found = scored((0.9, 0.85, 0.7, 0.1), (5, 4, 0, 0))
    assert [Band(tau)(found).worker for tau in (0, 0.1, 0.3)] == ["a", "b", "c"]
    assert Band(0.1)(found).candidates == ("a", "b")


@pytest.mark.parametrize("tau", [-0.1, 2.1, float("nan")])
def test_a_width_out_of_range_is_refused(tau):
    with pytest.raises(ConfigError, match="tau must be from 0 to 2"):
        Band(tau)


# --- of a width that load sets ------------------------------------------------------------------------


def test_where_loads_are_even_the_most_similar_is_chosen_however_little_it_leads():
    assert adaptive_band(scored((0.51, 0.5, 0.5, 0.5), (7, 7, 7, 7))).worker == "a"


@pytest.mark.parametrize(("requests", "worker"), [(7, "a"), (9, "b")])
def test_a_lead_is_worth_half_the_mean_load(requests, worker):
    # The leads are 1 and -1/3: a is preferred to b while 2 * (load[a] - load[b]) < 4/3.
    # 7: 2 * (8 - 5) / (19 / 4 + 1) = 1.04     9: 2 * (10 - 5) / (21 / 4 + 1) = 1.6
    found = scored((0.9, 0.1, 0.1, 0.1), (requests, 4, 4, 4))
    assert adaptive_band(found).worker == worker


def test_two_that_are_nearly_the_same_are_told_apart_by_load():
    assert adaptive_band(scored((0.9, 0.89, 0.1, 0.1), (5, 4, 5, 5))).worker == "b"


def test_equal_scores_are_least_load_and_its_ties():
    assert adaptive_band(scored((0.5, 0.5, 0.5, 0.5), (3, 1, 2, 1))).worker == "b"
    a, b, c, d = FOUR
    used = [(replace(a, assigned=9), 0.5), (replace(b, assigned=4), 0.5), (c, 0.5), (replace(d, assigned=2), 0.5)]
    assert adaptive_band(used).worker == "c"


@given(
    st.lists(st.floats(-1, 1), min_size=4, max_size=4),
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
)
def test_no_worker_is_passed_over_for_one_that_is_no_more_similar_and_no_less_loaded(scores, requests):
    found = scored(scores, requests)
    chosen = next(pair for pair in found if pair[0].name == adaptive_band(found).worker)
    assert not any(score > chosen[1] + 1e-9 and worker.requests < chosen[0].requests for worker, score in found)


@given(st.lists(st.integers(0, 8), min_size=4, max_size=4), st.sampled_from([0.25, 0.5, 2.0]), st.integers(-4, 4))
def test_only_differences_of_similarity_count(scores, scale, shift):
    requests = (3, 0, 5, 1)
    moved = [score * scale + shift for score in scores]  # exact in binary
    assert adaptive_band(scored(scores, requests)).worker == adaptive_band(scored(moved, requests)).worker


def test_what_was_compared_is_in_the_decision():
    decision = adaptive_band(scored((0.9, 0.8, 0.2, 0.1), (0, 0, 0, 0)))
    assert decision.reason == "adaptive band"
    assert decision.scores == (("a", 0.9), ("b", 0.8), ("c", 0.2), ("d", 0.1))
