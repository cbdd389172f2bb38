from dataclasses import replace

import numpy as np
import pytest

from coterie.analysis.heldout import ClusterSummary, HeldOut, hold_out, judge, report_clusters
from coterie.calibration import fit
from coterie.core import ModelGeometry
from coterie.errors import InputError
from made_traces import domains_differ, trace_of


def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def held():
    return hold_out(domains_differ(160), 4, rng())


def test_the_halves_share_no_request(held):
    trace = domains_differ(160)
    assert (held.fitted, len(held.requests)) == (80, 80)
    fitted = trace.select(np.setdiff1d(np.arange(160), held.requests))
    assert held.profile.trace_digest == fitted.digest()


def test_each_judged_request_is_at_its_nearest_centroid(held):
    scores = held.profile.transform.apply(domains_differ(160).prefill[held.requests]) @ held.profile.centroids.T
    assert np.array_equal(held.nearest, scores.argmax(axis=1))
    pools = held.pools()
    assert list(pools) == ["0", "1", "2", "3"]
    assert sorted(np.concatenate(list(pools.values()))) == held.requests.tolist()


def test_domains_that_differ_are_found_again(held):
    report = report_clusters(held, domains_differ(160).labels)
    assert report.purity == 1
    assert report.purity_of_one < 0.35
    assert {cluster.label for cluster in report.clusters} == {f"domain {i}" for i in range(4)}
    assert (report.kind, report.fitted, report.assigned, report.zero) == ("count_idf", 80, 80, 0)


def test_purity_and_balance_are_those_computed_by_hand(held):
    # cluster 0: a a b ; cluster 1: b ; 2 and 3 empty: purity (2 + 1) / 4, largest 3 over mean 1
    four = replace(held, requests=np.arange(4), rows=held.rows[:4], nearest=np.array([0, 0, 0, 1]))
    report = report_clusters(four, ("a", "a", "b", "b"))
    assert report.clusters[:2] == (ClusterSummary(3, "a", 2 / 3), ClusterSummary(1, "b", 1))
    assert report.clusters[3] == ClusterSummary(0, "", 0)
    assert (report.purity, report.purity_of_one, report.largest_over_mean) == (0.75, 0.5, 3)


def test_requests_without_labels_have_no_purity(held):
    report = report_clusters(held, ("",) * 160)
    assert (report.purity, report.purity_of_one) == (None, None)


def test_a_profile_of_another_trace_judges_every_request():
    trace = domains_differ(64)
    held = judge(trace, fit(domains_differ(160), 4, starts=1))
    assert (held.fitted, held.requests.tolist()) == (0, list(range(64)))
    assert report_clusters(held, trace.labels).purity == 1


def test_requests_with_a_zero_signature_are_left_out_and_counted(held):
    trace, layer = domains_differ(160), held.profile.transform.layers[0]
    idf = np.zeros((3, 32), dtype=np.float32)
    idf[layer, 7] = 1  # signatures see this one expert alone
    found = judge(trace, replace(held.profile, transform=replace(held.profile.transform, idf=idf)))
    lacking = trace.prefill[:, layer, 7] == 0
    assert 0 < found.zero == lacking.sum() < 160
    assert not lacking[found.requests].any()


def test_half_a_trace_must_make_the_clusters():
    with pytest.raises(InputError, match="one half of 9 requests cannot make 5 clusters"):
        hold_out(trace_of(9), 5, rng())


def test_a_profile_of_another_geometry_is_refused(held):
    other = replace(held.profile.transform, geometry=ModelGeometry(3, 32, 4))
    with pytest.raises(InputError, match="top-4"):
        judge(domains_differ(64), replace(held.profile, transform=other))


def test_nothing_to_judge_is_refused(held):
    empty = HeldOut(held.profile, 4, np.arange(0), held.rows[:0], np.arange(0), zero=3)
    with pytest.raises(InputError, match="all signatures are zero"):
        report_clusters(empty, ())
