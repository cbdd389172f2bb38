from dataclasses import replace

import numpy as np
import pytest

from coterie.activations import TraceRecord, build_trace
from coterie.calibration import fit
from coterie.core import ExpertCounts, ModelGeometry, RouteRequest, WorkerState, prompt_hash
from coterie.errors import InputError
from coterie.routing import LeastLoad, Ledger, Locality, Policy, route
from coterie.signature import fit_idf
from traces import random_counts, tiny_moe_trace

GROUPS = 8
BATCH = 32


@pytest.fixture(scope="module")
def halves():
    """The recorded trace in two halves, split at random."""
    order = np.random.default_rng(0).permutation(768)
    return tiny_moe_trace().select(order[:384]), tiny_moe_trace().select(order[384:])


@pytest.fixture(scope="module")
def profile(halves):
    return fit(halves[0], GROUPS, seed=0, starts=5)


def small_trace(labels, **changes):
    geometry = ModelGeometry(2, 8, 2)
    rng = np.random.default_rng(0)
    records = [
        TraceRecord(random_counts(rng, 5, geometry), random_counts(rng, 3, geometry), 4, prompt_hash([i]), label)
        for i, label in enumerate(labels)
    ]
    return replace(build_trace("m", records), **changes)


def purity(labels, clusters):
    """Share of requests that have the most frequent label of their cluster."""
    most = [np.unique(labels[clusters == k], return_counts=True)[1].max() for k in np.unique(clusters)]
    return sum(most) / len(labels)


# --- on the recorded trace ----------------------------------------------------------------------------


def test_clusters_of_unseen_requests_are_pure(halves, profile):
    unseen = halves[1]
    nearest = (profile.transform.apply(unseen.prefill) @ profile.centroids.T).argmax(axis=1)
    assert purity(np.array(unseen.labels), nearest) >= 0.80


def active_experts(trace, placed):
    """Mean distinct experts per group, step and layer, over the steps of the decoded outputs."""
    ids = trace.decode_ids.reshape(len(trace), 64, 5, 4)
    distinct = []
    for group in set(placed):
        members = ids[[i for i, name in enumerate(placed) if name == group]]
        for step in range(0, 64, 8):
            distinct += [np.unique(members[:, step, layer]).size for layer in range(5)]
    return np.mean(distinct)


def place(policy: Policy, trace, workers):
    """Route all requests of a trace; a group that has its batch takes no more."""
    ledger, placed = Ledger(workers), []
    for i in range(len(trace)):
        counts = ExpertCounts(trace.geometry, trace.prefill[i], 256, 256)
        request = RouteRequest(str(i), counts=counts)
        chosen = route(policy, request, ledger.states(), np.random.default_rng(0)).worker
        ledger.lease(chosen, request)
        ledger.set_available(chosen, len(ledger.held(chosen)) < BATCH)
        placed.append(chosen)
    return placed


def test_locality_makes_groups_read_fewer_experts_than_load_does(halves, profile):
    # 8 groups with batches of 32 unseen requests each: about 52 of 64 experts under least load, 40 in the best case
    unseen = halves[1].select(range(GROUPS * BATCH))
    workers = [WorkerState(f"d{i}", f"d{i}") for i in range(GROUPS)]
    by_load = active_experts(unseen, place(LeastLoad(), unseen, workers))
    by_locality = active_experts(unseen, place(Locality(profile, workers), unseen, workers))
    assert by_locality < 0.88 * by_load


def test_the_same_seed_gives_the_same_bytes(halves, tmp_path):
    for name in ("one", "two"):
        fit(halves[0], GROUPS, seed=3, starts=2).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_clusters_hold_at_most_their_share(halves, profile):
    assert profile.sizes.sum() == len(halves[0])
    assert profile.sizes.max() <= 48  # 384 / 8


def test_a_profile_says_where_it_comes_from(halves, profile):
    assert profile.trace_digest == halves[0].digest()
    assert (profile.model, profile.geometry, profile.seed) == ("tiny-moe", ModelGeometry(5, 64, 4), 0)
    assert profile.transform.layers == (0, 1, 2, 3, 4)
    np.testing.assert_array_equal(profile.transform.idf, fit_idf(halves[0].prefill))
    assert 0.8 < profile.cohesion < 1


def test_labels_are_reported_but_never_used(halves, profile):
    unlabelled = fit(replace(halves[0], labels=("",) * 384), GROUPS)
    np.testing.assert_array_equal(unlabelled.centroids, profile.centroids)
    assert unlabelled.labels == ("",) * GROUPS
    assert unlabelled.purity == 0
    assert profile.purity > 0.8


# --- on made-up traces --------------------------------------------------------------------------------


def test_the_most_frequent_label_is_the_first_in_the_alphabet_among_equals():
    profile = fit(small_trace(["b", "a", "b", "a", "c", ""]), 1)
    assert profile.labels == ("a",)
    assert profile.shares[0] == pytest.approx(2 / 6)  # unlabelled requests count in the whole


@pytest.mark.parametrize("clusters", [0, 4])
def test_too_few_requests_are_refused(clusters):
    with pytest.raises(InputError, match=rf"3 requests cannot make {clusters} clusters; .*ask for 1 to 3 clusters"):
        fit(small_trace("abc"), clusters)


def test_as_many_clusters_as_requests_is_fine():
    assert fit(small_trace("abc"), 3).sizes.tolist() == [1, 1, 1]


def test_partly_counted_prompts_are_refused_with_the_first_named():
    with pytest.raises(InputError, match=r"2 of 3 prompts were only partly counted \(request 1: 5 of 9 tokens\)"):
        fit(small_trace("abc", prefill_tokens=np.array([5, 9, 8])), 2)


def test_prompts_without_direction_are_refused():
    geometry = ModelGeometry(1, 3, 1)
    prefill = np.array([[[5, 0, 0]], [[3, 2, 0]], [[5, 0, 0]]], np.uint8)  # all use expert 0, whose weight is 0
    parts = [ExpertCounts(geometry, counts, 5, 5) for counts in prefill]
    trace = build_trace("m", [TraceRecord(part, part, 6, prompt_hash([i])) for i, part in enumerate(parts)])
    with pytest.raises(InputError, match=r"2 of 3 signatures are zero \(first: request 0\)"):
        fit(trace, 2)


def test_prompts_that_all_use_every_expert_are_refused():
    geometry = ModelGeometry(1, 2, 1)
    part = ExpertCounts(geometry, np.array([[2, 3]], np.uint8), 5, 5)
    trace = build_trace("m", [TraceRecord(part, part, 6, prompt_hash([i])) for i in range(3)])
    with pytest.raises(InputError, match="every request used every expert"):
        fit(trace, 2)
