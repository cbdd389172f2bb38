"""What a fit is worth on requests that it never saw, on the recorded trace."""

import numpy as np
import pytest

from coterie.analysis import DecodeUse, judge, report_clusters
from coterie.calibration import fit
from coterie.core import ExpertCounts, RouteRequest, WorkerState
from coterie.routing import LeastLoad, Ledger, Locality, Policy, route
from traces import tiny_moe_trace

GROUPS = 8
BATCH = 32


@pytest.fixture(scope="module")
def halves():
    """The recorded trace in two halves, split at random."""
    order = np.random.default_rng(0).permutation(768)
    return tiny_moe_trace().select(order[:384]), tiny_moe_trace().select(order[384:])


@pytest.fixture(scope="module")
def profile(halves):
    return fit(halves[0], GROUPS, kind="count_idf", layers="all", seed=0, starts=5, pairs=1000)


@pytest.fixture(scope="module")
def held_out(halves, profile):
    return judge(halves[1], profile)


def active_experts(trace, batches):
    """Mean number of different experts that a batch activates in a layer of a step, replayed from the ids."""
    use = DecodeUse(trace.decode, trace.decode_covered, trace.decode_ids)
    return use.active(batches).mean()


def test_clusters_of_unseen_requests_are_pure(halves, held_out):
    report = report_clusters(held_out, halves[1].labels)
    assert report.assigned == 384
    assert report.purity >= 0.80


def test_unseen_requests_of_a_cluster_activate_a_fifth_fewer_experts_than_random_ones(halves, held_out):
    rng = np.random.default_rng(0)
    clusters, random = [], []
    for members in held_out.pools().values():  # one decoder each; 384 / 8 = 48 requests on the mean
        live = min(BATCH, len(members))
        for _ in range(5):
            clusters.append(rng.choice(members, live, replace=False))
            random.append(rng.choice(384, live, replace=False))
    assert len(clusters) == 5 * GROUPS
    assert np.mean([len(batch) for batch in clusters]) > 31
    assert active_experts(halves[1], clusters) <= 0.80 * active_experts(halves[1], random)


def place(policy: Policy, trace, workers):
    """Route all requests of a trace, in order; a group that has its batch takes no more."""
    ledger, placed = Ledger(workers), {worker.name: [] for worker in workers}
    for i in range(len(trace)):
        request = RouteRequest(str(i), counts=ExpertCounts(trace.geometry, trace.prefill[i], 256, 256))
        chosen = route(policy, request, ledger.states(), np.random.default_rng(0)).worker
        ledger.lease(chosen, request)
        ledger.set_available(chosen, len(ledger.held(chosen)) < BATCH)
        placed[chosen].append(i)
    return list(placed.values())


def test_locality_makes_full_groups_read_fewer_experts_than_load_does(halves, profile):
    # groups fill up, so that late requests must go where there is room: about 52 of 64 experts under least load
    unseen = halves[1].select(range(GROUPS * BATCH))
    workers = [WorkerState(f"d{i}", f"d{i}") for i in range(GROUPS)]
    by_load = active_experts(unseen, place(LeastLoad(), unseen, workers))
    by_locality = active_experts(unseen, place(Locality(profile, workers), unseen, workers))
    assert by_locality < 0.88 * by_load
