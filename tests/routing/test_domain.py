import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coterie.activations import TraceRecord, build_trace
from coterie.core import ModelGeometry, RouteRequest, WorkerState, prompt_hash
from coterie.errors import ConfigError
from coterie.routing import Domain, Reads, route
from coterie.routing.domain import MISC, pools_of, quotas
from traces import random_counts

RNG = np.random.default_rng(0)
FOUR = tuple(WorkerState(name, name) for name in "abcd")


def labelled(*labels, prompts=None):
    geometry = ModelGeometry(1, 4, 1)
    counts = random_counts(np.random.default_rng(0), 3, geometry)
    prompts = prompts or range(len(labels))
    return build_trace(
        "m", [TraceRecord(counts, counts, 4, prompt_hash([p]), label) for p, label in zip(prompts, labels, strict=True)]
    )


# 8 requests on 4 groups: code 4/8 -> 2 groups, fr 2/8 -> 1, and de and zh, below 2 requests each, share the last
TRACE = labelled("code", "code", "code", "code", "fr", "fr", "de", "zh")


def choose(request, workers=FOUR, trace=TRACE):
    return Domain(trace, FOUR).choose(request, workers, RNG)


# --- quotas -------------------------------------------------------------------------------------------


def test_quotas_by_hand():
    # 7 groups, 100 requests: exact 3.5, 2.1, 1.4; whole parts 3, 2, 1; the one left goes to the remainder of 0.5
    assert quotas({"a": 50, "b": 30, "c": 20}, 7) == {"a": 4, "b": 2, "c": 1}


def test_small_domains_share_a_pool():
    # 4 groups, 20 requests: a domain needs 5. x and y and z have 8 together: 1.6 groups; a 2.4
    assert pools_of({"a": 12, "x": 4, "y": 3, "z": 1}, 4) == {"a": "a", "x": MISC, "y": MISC, "z": MISC}
    assert quotas({"a": 12, "x": 4, "y": 3, "z": 1}, 4) == {"a": 2, MISC: 2}


def test_equal_remainders_go_by_name():
    assert quotas({"b": 1, "a": 1, "c": 1}, 4) == {"a": 2, "b": 1, "c": 1}


def test_one_group_serves_everything():
    assert quotas({"a": 3, "b": 1}, 1) == {MISC: 1}
    assert quotas({"a": 3}, 1) == {"a": 1}


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(1, 50), min_size=1), st.integers(1, 12))
def test_every_group_is_given_out_and_each_share_is_off_by_less_than_one(requests, groups):
    shares, pools, total = quotas(requests, groups), pools_of(requests, groups), sum(requests.values())
    assert sum(shares.values()) == groups
    for pool in set(pools.values()):
        exact = groups * sum(n for label, n in requests.items() if pools[label] == pool) / total
        assert abs(shares[pool] - exact) < 1
        assert shares[pool] >= 1 or pool == MISC


# --- choosing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "pool", "workers"),
    [("code", "code", ("a", "b")), ("fr", "fr", ("c",)), ("de", MISC, ("d",)), ("zh", MISC, ("d",))],
)
def test_a_label_goes_to_its_pool(label, pool, workers):
    decision = choose(RouteRequest("r", domain=label))
    assert decision.candidates == workers
    assert (decision.worker, decision.reason, decision.detail) == (workers[0], "domain pool", pool)


def test_load_decides_inside_the_pool():
    a, b, c, d = FOUR
    assert (
        choose(RouteRequest("r", domain="code"), [replace(a, requests=2), replace(b, requests=1), c, d]).worker == "b"
    )


def test_a_known_prompt_needs_no_label():
    assert choose(RouteRequest("r", prompt_hash=prompt_hash([4]))).detail == "fr"


def test_the_clients_label_comes_first():
    assert choose(RouteRequest("r", domain="code", prompt_hash=prompt_hash([4]))).detail == "code"


@pytest.mark.parametrize(
    ("asked", "reason", "detail"),
    [
        (RouteRequest("r"), "load only: no label", ""),
        (RouteRequest("r", prompt_hash=prompt_hash("new")), "load only: no label", ""),
        (RouteRequest("r", domain="poetry"), "load only: unknown label", "poetry"),
        (RouteRequest("r", domain="x" * 5000), "load only: unknown label", "x" * 60),
    ],
)
def test_without_a_usable_label_load_decides_and_says_why(asked, reason, detail):
    workers = [replace(worker, requests=n) for worker, n in zip(FOUR, (3, 2, 0, 1), strict=True)]
    decision = choose(asked, workers)
    assert (decision.worker, decision.reason, decision.detail) == ("c", reason, detail)


def test_a_pool_that_is_down_gives_its_requests_to_all():
    a, b, c, d = FOUR
    decision = route(Domain(TRACE, FOUR), RouteRequest("r", domain="fr"), [a, b, replace(c, available=False), d], RNG)
    assert (decision.worker, decision.reason, decision.detail) == ("a", "load only: no worker in the pool", "fr")


def test_a_misc_pool_too_small_for_a_group_gives_its_requests_to_all():
    trace = labelled(*["a"] * 10, *["b"] * 9, "x")  # 4 groups, 20 requests: 2, 1.8, 0.2 -> 2, 2, 0
    assert choose(RouteRequest("r", domain="x"), trace=trace).reason == "load only: no worker in the pool"


def test_requests_without_label_do_not_count_in_the_shares():
    trace = labelled("a", "b", *[""] * 50)
    assert choose(RouteRequest("r", domain="b"), trace=trace).candidates == ("c", "d")


def test_all_ranks_of_a_group_are_in_its_pool():
    ranks = [WorkerState(f"{group}{rank}", group, rank) for group in "abcd" for rank in range(2)]
    decision = Domain(TRACE, ranks).choose(RouteRequest("r", domain="fr"), ranks, RNG)
    assert decision.candidates == ("c0", "c1")


def test_a_trace_without_labels_or_with_two_for_one_prompt_is_refused():
    with pytest.raises(ConfigError, match="no request of the trace has a label"):
        Domain(labelled("", ""), FOUR)
    with pytest.raises(ConfigError, match=r"labels the prompt .* both a and b"):
        Domain(labelled("a", "b", prompts=[1, 1]), FOUR)


def test_one_prompt_twice_with_one_label_is_fine():
    assert Domain(labelled("a", "", "a", prompts=[1, 1, 1]), FOUR).reads == {Reads.PROMPT_HASH}
