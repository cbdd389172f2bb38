"""Laws of the simulated cluster."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.calibration import fit
from coterie.core import ModelGeometry, RouteRequest, WorkerState
from coterie.errors import ConfigError
from coterie.latency import StepTime, TokenTime
from coterie.routing import DECODE_POLICIES, KvHeadroom, Ledger, make_policy, no_queue
from coterie.sim import Change, ClusterSpec, Drift, Mix, RecordedTimes, Stream, parse_topology, population_of, simulate
from coterie.sim.cluster import Cluster
from coterie.sim.kernel import Kernel
from coterie.sim.placement import contiguous, placements_of
from coterie.sim.spec import Topology
from coterie.sim.workload import arrivals
from made_traces import GEOMETRY, domains_differ

TRACE = domains_differ(40)
POPULATION = population_of(TRACE)
SPEC = ClusterSpec(2, 4, step_time=StepTime(4e-3, 1e-4, 1e-5), prefill_time=TokenTime(0.02, 1e-4), notice_s=0.2)
PROFILE = fit(TRACE, 4, starts=1, pairs=100)

CHANGES = st.lists(
    st.builds(
        Change,
        st.floats(0, 1.5),
        st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3"]),
        st.sampled_from(["lost", "joined"]),
    ),
    max_size=8,
)


def policies(spec=SPEC, decode="least_load", profile=PROFILE):
    return {
        "prefill": make_policy("prefix", spec.targets("prefill")),
        "decode": make_policy(decode, spec.targets("decode"), profile=profile, trace=TRACE),
    }


def run(decode="least_load", *, rate=60, seed=0, spec=SPEC, **options):
    return simulate(POPULATION, Stream(rate, 1.5), spec, **policies(spec, decode), seed=seed, **options)


def running(changes=(), *, rate=60, seed=0, spec=SPEC):
    """A cluster before its first event, and its kernel."""
    kernel = Kernel()
    cluster = Cluster(kernel, spec, POPULATION.experts, **policies(spec), seed=seed)
    cluster.plan(changes)
    cluster.feed(arrivals(POPULATION, Stream(rate, 1.5), seed))
    return cluster, kernel


# Prompts of 40 and outputs of 13 tokens: four blocks of 16 hold one request.
KINDS = st.sampled_from([{}, {"kv_tokens": 160}, {"ranks": 2, "kv_tokens": 80}, {"prefill_first": True, "ranks": 3}])


@settings(max_examples=16, deadline=None)
@given(changes=CHANGES, seed=st.integers(0, 99), absent=st.sets(st.sampled_from(["decode-1", "prefill-0"])), kind=KINDS)
def test_no_request_is_lost_or_made_up_at_any_time(changes, seed, absent, kind):
    cluster, kernel = running(changes, seed=seed, spec=replace(SPEC, absent=frozenset(absent), **kind))
    while kernel.step():
        now = cluster.census()
        assert now.arrived == now.finished + now.failed + now.queued + now.running
    assert (now.queued, now.running) == (0, 0)
    for role in ("prefill", "decode"):
        assert all((state.requests, state.tokens) == (0, 0) for state in cluster.states(role))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 99), kind=KINDS)
def test_what_the_ledger_says_of_a_worker_is_what_it_holds(seed, kind):
    cluster, kernel = running(seed=seed, rate=150, spec=replace(SPEC, **kind))
    while kernel.step():
        now = cluster.census()
        held = sum(state.requests for role in ("prefill", "decode") for state in cluster.states(role))
        assert held == now.queued + now.running


def test_no_token_comes_before_it_can():
    # Prefill of 40 tokens, handoff of 40 tokens and one step are the least that a first token takes.
    cluster, kernel = running(rate=150)
    kernel.run()
    least_s = SPEC.prefill_time.seconds(40) + SPEC.handoff_time.seconds(40) + SPEC.step_time.step_s(1, 0)
    assert len(cluster.outcomes.ttft_s) == cluster.census().arrived > 150
    assert min(cluster.outcomes.ttft_s) >= least_s
    assert min(cluster.outcomes.tpot_s) >= SPEC.step_time.step_s(1, 0)


def test_the_future_does_not_change_the_past():
    """Until a worker is lost, all goes as if it never were."""
    decisions = []
    for changes in ((), [Change(1.0, "decode-2", "lost")]):
        log = []
        run(changes=changes, on_decision=log.append)
        decisions.append([(one.time_s, one.decision) for one in log])
    before = [[one for one in log if one[0] < 1.0] for log in decisions]
    assert before[0] == before[1]
    assert decisions[0] != decisions[1]


@pytest.mark.parametrize("decode", DECODE_POLICIES)
def test_the_same_seed_gives_the_same_bytes_and_another_one_others(decode):
    once, again, other = (msgspec.json.encode(run(decode, seed=seed)) for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_policies_are_told_the_time_of_the_simulation_from_its_first_moment():
    """A kernel that has nothing to do yet has no length; it is a clock all the same."""
    told = []

    class Noting:
        def leased(self, lease, now_s):
            told.append(now_s)

        def released(self, lease, served, now_s):
            told.append(now_s)

    ledger = Ledger([WorkerState("a", "a")], Kernel())
    ledger.follow(Noting())
    ledger.lease("a", RouteRequest("r", 1, 1)).release()
    assert told == [0.0, 0.0]


def test_policies_of_one_seed_meet_the_same_requests():
    seen = []
    for decode in ("random", "locality"):
        log = []
        run(decode, on_decision=log.append)
        met = [(one.time_s, one.arrival.position) for one in log if one.role == "prefill"]
        seen.append(met)
    assert seen[0] == seen[1]


def test_permuting_the_workers_permutes_the_decisions_and_nothing_else():
    """Centroid k belongs to worker k: give worker k the centroid of worker order[k]."""
    order = np.array([2, 0, 3, 1])
    chosen, rows = [], []
    for profile in (PROFILE, replace(PROFILE, centroids=PROFILE.centroids[order])):
        log = []
        both = policies() | {"decode": make_policy("locality", SPEC.targets("decode"), profile=profile, tau=0)}
        row = simulate(
            POPULATION,
            Stream(60, 1.5),
            SPEC,
            **both,
            on_decision=log.append,
        )
        chosen.append([one.decision.worker for one in log if one.role == "decode"])
        rows.append(row)
    assert rows[0].tpot_p99_ms == rows[1].tpot_p99_ms
    assert [f"decode-{order[int(name.removeprefix('decode-'))]}" for name in chosen[1]] == chosen[0]
    assert len(set(chosen[0])) == 4


@pytest.mark.parametrize("ids", [True, False])
def test_an_idle_cluster_s_times_are_those_of_the_latency_model(ids):
    population = population_of(TRACE if ids else replace(TRACE, decode_ids=None))
    row = simulate(population, RecordedTimes((0.0, 5.0, 10.0)), SPEC, **policies())
    # One request uses top-2 of 3 layers at each step, 6 experts: 4 + 0.1 + 6 x 0.01 = 4.16 ms.
    assert row.active_experts_mean == pytest.approx(2, rel=1e-5)
    for figure in (row.tpot_p50_ms, row.tpot_p99_ms):
        assert figure == pytest.approx(4.16, rel=1e-5)
    # Prefill 20 + 40 x 0.1, handoff 2 + 40 x 0.002, the first step 4.16: 30.24 ms.
    assert row.ttft_p50_ms == pytest.approx(30.24, rel=1e-5)
    assert (row.requests, row.failed, row.decode_steps, row.batch_mean) == (3, 0, 3 * 13, 1.0)
    # The last of three requests ends at 10 s + 30.24 ms + 12 x 4.16 ms; 4 workers.
    assert row.busy_share == pytest.approx(39 * 4.16e-3 / (4 * (10 + 0.03024 + 12 * 4.16e-3)), rel=1e-5)


def test_with_the_first_token_from_prefill_the_handoff_counts_to_the_time_per_output_token():
    row = simulate(POPULATION, RecordedTimes((0.0, 5.0)), replace(SPEC, prefill_first=True), **policies())
    # Prefill 20 + 40 x 0.1: 24 ms; then handoff 2 + 40 x 0.002 and 12 steps of 4.16 ms for the 12 other tokens.
    assert row.ttft_p50_ms == pytest.approx(24, rel=1e-5)
    assert row.tpot_p50_ms == pytest.approx((2.08 + 12 * 4.16) / 12, rel=1e-5)
    assert row.decode_steps == 2 * 12


def test_a_single_token_from_prefill_needs_no_decode_worker():
    log = []
    population = population_of(TRACE, output_tokens=1)
    spec = replace(SPEC, prefill_first=True)
    row = simulate(population, Stream(30, 1.0), spec, **policies(), on_decision=log.append)
    assert {one.role for one in log} == {"prefill"}
    assert (row.failed, row.decode_steps, row.tpot_p50_ms) == (0, 0, None)
    assert row.ttft_p50_ms >= 24


def test_what_comes_during_the_warm_up_is_served_and_in_no_figure():
    log = []
    row = simulate(
        POPULATION, RecordedTimes((0.0, 5.0, 10.0)), SPEC, **policies(), warm_up_s=5.0, on_decision=log.append
    )
    assert len(log) == 6
    assert (row.warm_up_s, row.requests, row.decode_steps) == (5.0, 2, 2 * 13)
    assert row.busy_share == pytest.approx(26 * 4.16e-3 / (4 * (5 + 0.03024 + 12 * 4.16e-3)), rel=1e-5)


def test_a_run_that_is_all_warm_up_has_no_figures():
    row = run(warm_up_s=60.0)
    assert (row.requests, row.failed, row.decode_steps, row.tpot_p50_ms, row.busy_share) == (0, 0, 0, None, None)


def test_requests_follow_the_mix():
    log = []
    drift = Drift(((0.0, Mix((("domain 0", 1.0),))), (0.7, Mix((("domain 3", 1.0),)))))
    run(drift=drift, on_decision=log.append)
    met = {(one.time_s >= 0.7, one.arrival.request.domain) for one in log if one.role == "prefill"}
    assert met == {(False, "domain 0"), (True, "domain 3")}


def test_locality_brings_requests_of_a_kind_together():
    apart, together = run("round_robin", rate=200), run("locality", rate=200)
    assert together.active_experts_mean < 0.9 * apart.active_experts_mean
    assert together.tpot_p50_ms < apart.tpot_p50_ms


def test_requests_fail_at_a_lost_worker_until_the_gateway_knows():
    log = []
    row = run(changes=[Change(0.5, "decode-1", "lost")], on_decision=log.append)
    last_s = max(one.time_s for one in log if one.decision.worker == "decode-1")
    assert 0.5 < last_s < 0.5 + SPEC.notice_s
    assert 0 < row.failed < 60


def test_a_worker_that_joins_is_used_from_then_on():
    log = []
    row = run(
        spec=replace(SPEC, absent=frozenset({"decode-3"})),
        changes=[Change(0.7, "decode-3", "joined")],
        on_decision=log.append,
    )
    assert row.failed == 0
    first_s = min(one.time_s for one in log if one.decision.worker == "decode-3")
    assert 0.7 <= first_s < 0.8


def test_a_worker_that_is_back_before_anyone_noticed_stays():
    log = []
    row = run(changes=[Change(0.5, "decode-1", "lost"), Change(0.6, "decode-1", "joined")], on_decision=log.append)
    assert 0 < row.failed < 30
    assert max(one.time_s for one in log if one.decision.worker == "decode-1") > 1.0


def test_without_workers_every_request_fails_and_figures_are_absent():
    row = run(spec=replace(SPEC, absent=frozenset(f"decode-{i}" for i in range(4))))
    assert row.failed == row.requests > 0
    assert (row.tpot_p50_ms, row.ttft_p50_ms, row.active_experts_mean, row.busy_share) == (None,) * 4


def test_what_is_held_does_not_grow_with_time():
    sizes = []
    for duration_s in (1.0, 4.0):
        kernel = Kernel()
        cluster = Cluster(kernel, SPEC, POPULATION.experts, **policies())
        cluster.feed(arrivals(POPULATION, Stream(60, duration_s), 0))
        most = 0
        while kernel.step():
            now = cluster.census()
            most = max(most, len(kernel) + now.queued + now.running)
        sizes.append(most)
    assert sizes[1] < 1.5 * sizes[0]


def test_locality_chooses_the_group_and_load_the_rank():
    spec = replace(SPEC, ranks=3)
    log = []
    simulate(POPULATION, Stream(90, 1.5), spec, **policies(spec, "locality"), on_decision=log.append)
    chosen = [one.decision for one in log if one.role == "decode"]
    assert {decision.worker for decision in chosen} == {f"decode-{g}.{r}" for g in range(4) for r in range(3)}
    for decision in chosen:  # whole groups are in the band
        groups = [name.partition(".")[0] for name in decision.candidates]
        assert all(groups.count(group) == 3 for group in groups)


@pytest.mark.parametrize("name", ["decode-1", "decode-1.0", "decode-1.2"])
def test_a_lost_rank_loses_its_group_and_the_gateway_notices_all_of_it(name):
    log = []
    spec = replace(SPEC, ranks=3)
    changes = [Change(0.5, name, "lost"), Change(1.2, name, "joined")]
    row = simulate(POPULATION, Stream(90, 1.5), spec, **policies(spec), changes=changes, on_decision=log.append)
    times = [one.time_s for one in log if one.decision.worker.startswith("decode-1.")]
    assert row.failed > 0
    assert not [time_s for time_s in times if 0.5 + SPEC.notice_s <= time_s < 1.2]
    assert {one.decision.worker for one in log if one.time_s >= 1.2} > {f"decode-1.{rank}" for rank in range(3)}


def test_experts_placed_for_each_group_s_requests_shorten_its_steps():
    spec = replace(SPEC, ranks=4)
    by_default, placed = (
        simulate(POPULATION, Stream(200, 1.5), one, **policies(one, "locality"))
        for one in (spec, replace(spec, placements=placements_of(PROFILE, TRACE, 4, batch=16)))
    )
    assert placed.busiest_rank_experts_mean < 0.95 * by_default.busiest_rank_experts_mean
    assert placed.tpot_p50_ms < by_default.tpot_p50_ms
    for row in (by_default, placed):  # the busiest of four ranks holds at least a quarter
        assert row.active_experts_mean / 4 <= row.busiest_rank_experts_mean <= row.active_experts_mean


def test_experts_may_be_spread_over_more_ranks_than_take_requests():
    spec = replace(SPEC, expert_ranks=4)
    assert [target.name for target in spec.targets("decode")] == [f"decode-{i}" for i in range(4)]
    alone, spread = (simulate(POPULATION, RecordedTimes((0.0,)), one, **policies(one)) for one in (SPEC, spec))
    # One request uses 2 experts of each of 3 layers: on one rank both count, on four one or two.
    assert alone.busiest_rank_experts_mean == pytest.approx(2, rel=1e-5)
    assert 1 <= spread.busiest_rank_experts_mean < 2
    saved_s = (2 - spread.busiest_rank_experts_mean) * 3 * SPEC.step_time.per_expert_s
    assert 1000 * saved_s == pytest.approx(alone.tpot_p50_ms - spread.tpot_p50_ms, rel=0.2)


def test_a_request_that_no_worker_has_room_for_is_refused_before_the_run():
    with pytest.raises(ConfigError, match="kv_tokens of 50 hold 3 blocks of 16; the longest request has 53 tokens"):
        run(spec=replace(SPEC, kv_tokens=50))


def test_scarce_kv_preempts_and_nothing_is_lost():
    scarce, ample = (run(rate=200, spec=replace(SPEC, kv_tokens=tokens)) for tokens in (160, None))
    assert scarce.preemptions > 0 == ample.preemptions
    assert (scarce.failed, scarce.requests) == (0, ample.requests)
    assert scarce.batch_mean < ample.batch_mean


def test_topologies_are_read_and_others_refused():
    assert parse_topology("8P16D") == Topology(8, 16, 1)
    assert parse_topology("2P4Dx8") == Topology(2, 4, 8)
    for text in ("8p16d", "0P4D", "8P", "8P16D ", "99999P1D", "2P4Dx0", "2P4Dx"):
        with pytest.raises(ConfigError, match="is not like 8P16D"):
            parse_topology(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill", 0),
        ("batch_requests", 0),
        ("cache_tokens", -1),
        ("notice_s", float("inf")),
        ("ranks", 0),
        ("expert_ranks", 0),
        ("kv_tokens", 15),
        ("graph_sizes", (2, 1)),
        ("graph_sizes", (0, 4)),
        ("placement", (contiguous(GEOMETRY, 1),)),
        ("placement", (contiguous(GEOMETRY, 2),) * 4),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_by_name(name, value):
    field = "placements" if name == "placement" else name
    with pytest.raises(ConfigError, match=name):
        replace(SPEC, **{field: value})


def test_experts_and_ranks_must_fit_one_another():
    with pytest.raises(ConfigError, match="33 ranks for 32 experts"):
        run(spec=replace(SPEC, ranks=33))
    with pytest.raises(ConfigError, match=r"a placement of \(3, 16\) experts, 16 slots; the model has \(3, 32\)"):
        run(spec=replace(SPEC, placements=(contiguous(ModelGeometry(3, 16, 2), 1),) * 4))


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_warm_up_that_cannot_be_is_refused(seconds):
    with pytest.raises(ConfigError, match="warm_up_s must be finite and not negative"):
        run(warm_up_s=seconds)


def test_workers_that_are_not_there_are_named():
    with pytest.raises(ConfigError, match="no worker is named 'decode-9'"):
        replace(SPEC, absent=frozenset({"decode-9"}))
    with pytest.raises(ConfigError, match="no worker is named 'decode-4'"):
        run(changes=[Change(1.0, "decode-4", "lost")])
    with pytest.raises(ConfigError, match=r"decode-1 lost at -1.0 s, which is not to come"):
        run(changes=[Change(-1.0, "decode-1", "lost")])


# --- filters ---


@pytest.mark.parametrize(
    ("passes", "why"), [(KvHeadroom(0.7), "KV cache is full"), (no_queue, "requests wait")], ids=["headroom", "queue"]
)
def test_decode_workers_without_room_are_passed_over_and_requests_wait_less(passes, why):
    scarce = replace(SPEC, kv_tokens=320, reading_interval_s=0.01)
    without, decisions = run("random", rate=120, spec=scarce), []
    filtered = run("random", rate=120, spec=replace(scarce, filters=(passes,)), on_decision=decisions.append)
    assert {reason for decided in decisions for _, reason in decided.decision.passed_over} == {why}
    assert filtered.failed == without.failed == 0
    assert filtered.ttft_p99_ms < 0.5 * without.ttft_p99_ms
    assert filtered.preemptions < without.preemptions


def test_a_reading_of_a_decode_worker_is_its_kv_and_who_waits_for_room_or_a_place():
    spec = replace(SPEC, decode=1, batch_requests=1, kv_tokens=160, filters=(no_queue,), reading_interval_s=0.01)
    cluster, kernel = running(rate=150, spec=spec)
    readings = set()
    while kernel.step():
        if (reading := cluster.states("decode")[0].reading) is not None:
            readings.add((round(reading.kv_usage, 1), reading.waiting > 0))
    # Ten blocks; a request has three to four of them.  Whoever pulls waits for nothing; who has pulled, for the place.
    assert {usage for usage, _ in readings} <= {0.0, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0}
    assert {waits for _, waits in readings} == {False, True}
