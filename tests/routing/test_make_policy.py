import numpy as np
import pytest

from coterie.calibration import fit
from coterie.core import RouteRequest, WorkerState
from coterie.errors import ConfigError, ProfileError
from coterie.routing import DECODE_POLICIES, PREFILL_POLICIES, make_policy
from traces import tiny_moe_trace

EIGHT = tuple(WorkerState(f"d{i}", f"d{i}") for i in range(8))


@pytest.fixture(scope="module")
def profile():
    return fit(tiny_moe_trace(), 8, starts=1)


@pytest.mark.parametrize("name", sorted({*DECODE_POLICIES, *PREFILL_POLICIES}))
def test_every_policy_is_made_by_its_name_and_decides(profile, name):
    policy = make_policy(name, EIGHT, profile=profile, trace=tiny_moe_trace())
    assert policy.name == name
    decision = policy.choose(RouteRequest("r"), EIGHT, np.random.default_rng(0))
    assert decision.worker in {worker.name for worker in EIGHT}
    assert decision.reason


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown policy 'fastest'; there are round_robin, .*, locality, .*prefix"):
        make_policy("fastest", EIGHT)


@pytest.mark.parametrize(("name", "needs"), [("locality", "needs a profile"), ("domain", "needs a labelled trace")])
def test_what_a_policy_needs_is_asked_for(name, needs):
    with pytest.raises(ConfigError, match=needs):
        make_policy(name, EIGHT)


def test_a_mismatched_profile_is_an_error_unless_load_alone_is_asked_for(profile):
    with pytest.raises(ProfileError, match="8 centroids for 6 decode groups"):
        make_policy("locality", EIGHT[:6], profile=profile)
    policy = make_policy("locality", EIGHT[:6], profile=profile, on_mismatch="load")
    decision = policy.choose(RouteRequest("r"), EIGHT[:6], np.random.default_rng(0))
    assert policy.name == "least_load"
    assert decision.reason == "load only: profile mismatch"
    assert decision.detail == "8 centroids for 6 decode groups"


def test_asking_for_load_changes_nothing_where_the_profile_fits(profile):
    assert make_policy("locality", EIGHT, profile=profile, on_mismatch="load").name == "locality"
