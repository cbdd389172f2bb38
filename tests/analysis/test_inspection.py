from dataclasses import replace

import numpy as np
import pytest

from coterie.analysis import inspect_profile, inspect_trace
from coterie.calibration import fit
from coterie.core import ModelGeometry
from coterie.errors import InputError, ProfileError
from made_traces import domains_differ, like_untrained, roughly, trace_of, without_labels, without_output
from traces import coterie_tiny_trace, tiny_moe_trace, untrained_trace


def missing(found):
    return {one.part: one.reason for one in found.missing}


@pytest.fixture(autouse=True)
def rough():
    with roughly():
        yield


def test_a_trained_model_is_found_to_be_worth_it():
    trained = inspect_trace(tiny_moe_trace().select(np.arange(0, 768, 2)), clusters=8)
    assert trained.verdict.level == "yes"
    assert trained.method == "replayed"
    cluster = {one.batch: one for one in trained.active if one.placement == "cluster"}
    assert cluster[8].reduction.low > 0.08
    assert trained.clusters.purity > 2 * trained.clusters.purity_of_one
    assert trained.correlation.own.mean > trained.correlation.same_domain.mean > trained.correlation.other.mean
    assert [one.kind for one in trained.quality] == ["count_idf", "count", "sqrt", "binary"]
    assert len(trained.skew) == 5
    assert trained.missing == ()


def test_high_r_and_rho_prove_nothing():
    found = inspect_trace(like_untrained(200), clusters=4)
    assert found.correlation.own.mean > 0.9
    assert found.correlation.other.mean < 0.1
    assert found.quality[0].rho.value > 0.7
    assert found.verdict.level == "no"


def test_domains_that_differ_are_worth_it_and_their_experts_are_told_apart():
    found = inspect_trace(domains_differ(200), clusters=4)
    assert found.verdict.level == "yes"
    assert found.use.names == tuple(f"domain {i}" for i in range(4))
    assert found.use.difference.min() > 0.3


def test_the_same_seed_gives_the_same_findings():
    once, again, other = (inspect_trace(domains_differ(64), clusters=2, seed=seed) for seed in (1, 1, 2))
    assert (once.verdict, once.active, once.clusters) == (again.verdict, again.active, again.clusters)
    assert np.array_equal(once.plot.projection.points, again.plot.projection.points)
    assert once.active != other.active


def test_without_labels_clusters_take_the_place_of_domains():
    found = inspect_trace(without_labels(domains_differ(136)), clusters=4)
    assert missing(found) == {"domain batches": "no labels: nothing to tell apart"}
    assert found.use.names == ("cluster 0", "cluster 1", "cluster 2", "cluster 3")
    assert (found.clusters.purity, found.correlation.same_domain, found.quality[0].within) == (None, None, None)
    assert {one.placement for one in found.active} == {"random", "cluster"}


def test_one_label_tells_nothing_apart():
    found = inspect_trace(trace_of(96, domains=1, shared=2.0), clusters=2)
    assert missing(found) == {"domain batches": "one label: nothing to tell apart"}
    assert found.verdict.level in ("no", "cannot tell")


def test_without_ids_unions_are_expected_ones():
    trace = domains_differ(136)
    found, replayed = (inspect_trace(one, clusters=4) for one in (replace(trace, decode_ids=None), trace))
    assert found.method == "expected"
    for expected, exact in zip(found.active, replayed.active, strict=True):
        assert (expected.active is None) == (exact.active is None)
        if exact.active:
            assert expected.active.value == pytest.approx(exact.active.value, rel=0.03)


def test_without_output_only_prompts_are_told_of():
    found = inspect_trace(without_output(domains_differ(96)), clusters=4)
    assert found.verdict.level == "cannot tell"
    assert (found.correlation, found.quality, found.selection, found.active, found.method) == (None,) * 5
    assert all("no output tokens" in missing(found)[part] for part in ("correlation", "selection", "active"))
    assert found.clusters.purity == 1  # all layers, since none can be chosen
    assert found.clusters.layers == (0, 1, 2)
    assert len(found.skew) == 3


def test_requests_that_were_partly_counted_or_gave_no_output_are_left_out_and_counted():
    trace = domains_differ(100)
    tokens = trace.prefill_tokens.copy()
    tokens[:3] += 1  # one token of each more than was counted
    decode, covered = trace.decode.copy(), trace.decode_covered.copy()
    decode[3:5], covered[3:5] = 0, 0
    found = inspect_trace(
        replace(trace, prefill_tokens=tokens, decode=decode, decode_covered=covered, decode_ids=None), clusters=2
    )
    subject = found.subject
    assert (subject.requests, subject.partly_counted, subject.without_output, subject.used) == (100, 3, 2, 95)
    assert found.correlation.own.count == 95
    assert found.clusters.fitted + found.clusters.assigned == 95
    assert subject.labels == {"domain 0": 23, "domain 1": 24, "domain 2": 24, "domain 3": 24}


def test_copies_of_prompts_are_no_locality():
    alone = like_untrained(160)
    copied = alone.select([*range(160), *range(160)])
    found = inspect_trace(copied, clusters=4)
    assert (found.subject.repeated, found.subject.used) == (160, 160)
    assert found.active == inspect_trace(alone, clusters=4).active
    assert found.verdict.level == "no"


def test_of_copies_the_first_that_is_usable_is_taken():
    trace = trace_of(70)
    tokens = np.concatenate([trace.prefill_tokens + 1, trace.prefill_tokens])  # none of the first ones is complete
    doubled = replace(trace.select([*range(70), *range(70)]), prefill_tokens=tokens)
    subject = inspect_trace(doubled, clusters=2).subject
    assert (subject.partly_counted, subject.repeated, subject.used) == (70, 0, 70)


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed must not be negative, got -1"):
        inspect_trace(trace_of(4), seed=-1)


def test_a_trace_without_a_completely_counted_prompt_is_refused():
    trace = trace_of(4)
    with pytest.raises(InputError, match="none of the 4 prompts was completely counted"):
        inspect_trace(replace(trace, prefill_tokens=trace.prefill_tokens + 1))


@pytest.mark.parametrize("requests", [1, 2, 9])
def test_a_handful_of_requests_tells_nothing_and_says_why(requests):
    found = inspect_trace(trace_of(requests), clusters=8)
    assert found.verdict.level == "cannot tell"
    assert f"one half of {requests} requests cannot make 8 clusters" in missing(found)["clusters"]
    assert found.clusters is None
    assert found.plot is None


def test_gate_sums_are_two_more_kinds_of_signature():
    trace = domains_differ(64)
    sums = trace.prefill.astype(np.float32)
    found = inspect_trace(replace(trace, gate_prob=sums, gate_logit=-sums), clusters=2)
    rho = {one.kind: one.rho.value for one in found.quality}
    assert list(rho) == ["count_idf", "count", "sqrt", "binary", "gate_prob", "gate_logit"]
    assert rho["gate_prob"] == rho["gate_logit"] == rho["count"]  # cosines are the same


def test_a_profile_of_another_trace_is_judged_on_all_requests():
    found = inspect_trace(domains_differ(96), profile=fit(domains_differ(64), 4, kind="count", layers="all", starts=1))
    assert (found.clusters.fitted, found.clusters.assigned, found.clusters.kind) == (0, 96, "count")


def test_a_profile_of_the_same_trace_is_judged_by_fitting_half_of_it_alike():
    trace = domains_differ(96)
    found = inspect_trace(trace, profile=fit(trace, 3, kind="sqrt", layers=(0, 2), starts=1))
    assert (found.clusters.fitted, found.clusters.assigned) == (48, 48)
    assert (found.clusters.kind, found.clusters.layers, len(found.clusters.clusters)) == ("sqrt", (0, 2), 3)


def test_a_profile_that_cannot_be_meant_is_refused():
    trace, profile = trace_of(16), fit(trace_of(16), 2, layers="all", starts=1)
    with pytest.raises(InputError, match="3 clusters are asked for beside a profile of 2"):
        inspect_trace(trace, profile=profile, clusters=3)
    other = replace(profile, transform=replace(profile.transform, geometry=ModelGeometry(3, 32, 5)))
    with pytest.raises(ProfileError, match="top-5"):
        inspect_trace(trace, profile=other)


def test_a_profile_alone_tells_how_far_its_clusters_are_apart():
    profile = fit(domains_differ(64), 4, starts=1)
    found = inspect_profile(profile)
    assert [cluster.size for cluster in found.clusters] == [16] * 4
    assert found.purity == 1
    nearest = found.clusters[0].nearest
    assert found.clusters[0].cosine == found.similarity[0, nearest] == np.delete(found.similarity[0], 0).max()
    assert found.clusters[0].experts == profile.characteristic_experts(0, 4)
    single = inspect_profile(fit(without_labels(domains_differ(64)), 1, starts=1))
    assert (single.purity, single.clusters[0].nearest, single.clusters[0].cosine) == (None, None, None)


# --- two small models on the same prompts: one trained, one with the random weights it began with --------


def test_only_the_trained_model_is_worth_routing_for():
    trained = inspect_trace(coterie_tiny_trace(), clusters=8)
    untrained = inspect_trace(untrained_trace(), clusters=8)
    assert trained.verdict.level == "yes"
    assert untrained.verdict.level == "no"
    # what proves nothing: random weights have these too
    assert untrained.correlation.own.mean > 0.8
    rho = {quality.kind: quality.rho.value for quality in untrained.quality}
    assert rho["count"] > 0.8
