"""The scheduler side against a random paged-KV engine that keeps the truth."""

from __future__ import annotations

import numpy as np
import pytest
from toy_engine import BLOCK, GEOMETRY, Request, ToyEngine, experts_of

from coterie.vllm_plugin.plan import CountsPlan
from coterie.vllm_plugin.slots import PARTS, Layout, Slots
from coterie.wire import OUTPUT_IDS_KEY, OUTPUT_KEY, PROMPT_KEY, decode_counts, read_routed_experts

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
COUNTS = {"coterie": "counts"}
IDS = {"coterie": "counts+ids"}


def run_traffic(seed: int, outside: bool, lag: bool = False, requests: int = 24) -> ToyEngine:
    engine = ToyEngine(seed, outside=outside, lag=lag)
    rng = np.random.default_rng(seed + 1)
    for number in range(requests):
        prompt = rng.integers(0, 2, rng.integers(1, 18)).tolist()  # few symbols, so that prefixes repeat
        plain = rng.random() < 0.2
        params = {} if plain else (PREFILL, PREFILL, COUNTS, IDS, IDS)[rng.integers(5)]
        limit = 1 if "do_remote_decode" in params else int(rng.integers(1, 9))
        engine.submit(Request(f"r{number}", prompt, len(prompt), limit, params))
        engine.step()
    for _ in range(4000):
        if not (engine.waiting or engine.running):
            return engine
        engine.step()
    raise AssertionError("the toy engine does not come to an end")


def check(envelope, truth, tokens):
    read = decode_counts(envelope)
    covered, counts = truth
    assert (read.tokens, read.covered) == (tokens, covered)
    np.testing.assert_array_equal(read.counts, counts)


def output_truth(request):
    """Whole minus prompt; unknown (not covered) where a preempted request may not have got its whole prompt back."""
    (whole, total), (covered, prompt) = request.total_truth, request.prompt_truth
    known = covered == request.prompt and whole == request.last
    if request.limit == 1 or (request.readmitted and not known):
        return 0, np.zeros_like(prompt)
    return whole - covered, total - prompt


def check_ids(reply, request):
    """The ids in order where all of the output was counted, and nothing otherwise; whether there was nothing."""
    if reply[OUTPUT_IDS_KEY] is None:
        assert output_truth(request)[0] < request.limit - 1
        return True
    ids = read_routed_experts(reply[OUTPUT_IDS_KEY], GEOMETRY)
    assert len(ids) == request.limit - 1
    for position, row in enumerate(ids, request.prompt):
        np.testing.assert_array_equal(row, experts_of(tuple(request.tokens[: position + 1])))
    return False


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_counts_and_ids_are_exactly_the_tokens_forwarded_whatever_happens_to_blocks(seed, lag):
    engine = run_traffic(seed, outside=True, lag=lag)
    dropped = 0
    for request, reply in engine.answers.values():
        if not request.finished:
            continue
        if not {"do_remote_decode", "coterie"} & request.params.keys():
            assert reply is None
            continue
        check(reply[PROMPT_KEY], request.prompt_truth, request.prompt)
        if "coterie" in request.params:
            check(reply[OUTPUT_KEY], output_truth(request), request.limit - 1)
        else:
            assert OUTPUT_KEY not in reply
        if request.params is IDS:
            dropped += check_ids(reply, request)
        else:
            assert OUTPUT_IDS_KEY not in reply
    assert engine.plan.live_slots == 0
    assert engine.plan.take_dropped() >= dropped  # aborted requests may lack their last step


def test_the_toy_engine_really_does_all_it_claims():
    seen = dict.fromkeys(ToyEngine(0).events, 0)
    for seed in range(10):
        for name, times in run_traffic(seed, outside=True, lag=True).events.items():
            seen[name] += times
    assert min(seen.values()) >= 10, seen


@pytest.mark.parametrize("seed", range(10))
def test_without_outside_fills_every_token_is_covered(seed):
    for request, reply in run_traffic(seed, outside=False).answers.values():
        if reply:
            counts = decode_counts(reply[PROMPT_KEY])
            assert counts.complete
            expected = np.zeros((GEOMETRY.layers, GEOMETRY.experts), int)
            for end in range(1, request.prompt + 1):
                for layer, ids in enumerate(experts_of(tuple(request.tokens[:end]))):
                    expected[layer, ids] += 1
            np.testing.assert_array_equal(counts.counts, expected)


def layout(slots):
    return Layout(slots, GEOMETRY, page_tokens=16)


def plan_with_worker(slots=2):
    plan = CountsPlan(layout(slots), BLOCK)
    worker = Slots.open(str(plan._path), layout(slots))
    worker.announce(GEOMETRY.layers)
    plan.close()  # as its first step would: some tests take none
    return plan, worker


@pytest.mark.parametrize("params", [None, [], "counts", {"coterie": ["counts"]}, {"coterie": {}}, {"coterie": 1}])
def test_a_client_cannot_break_the_scheduler_with_strange_parameters(params):
    plan, _ = plan_with_worker()
    plan.request_added("a", 3, params)
    assert not plan.step({"a": (0, 3)}, lambda _: [0]).jobs
    assert plan.request_finished("a", 4) is None


def test_when_slots_run_out_the_reply_has_no_counts_and_the_loss_is_counted():
    plan, _ = plan_with_worker(slots=1)
    for name in ("a", "b"):
        plan.request_added(name, 3, PREFILL)
    step = plan.step({"a": (0, 3), "b": (0, 3)}, lambda name: [0] if name == "a" else [1])
    assert len(step.jobs) == 1
    assert plan.request_finished("b", 4) is None
    assert (plan.take_dropped(), plan.take_dropped()) == (1, 0)
    assert plan.live_slots == 1
    plan.request_finished("a", 4)
    assert plan.live_slots == 0


def test_a_prompt_that_found_no_slot_is_not_summed_later_with_its_output():
    plan, _ = plan_with_worker(slots=1)
    for name in ("a", "b"):
        plan.request_added(name, 3, COUNTS)
    plan.step({"a": (0, 3), "b": (0, 3)}, lambda name: [0] if name == "a" else [1])
    plan.request_finished("a", 4)
    assert not plan.step({"b": (3, 1)}, lambda _: [1]).jobs
    assert plan.request_finished("b", 5) is None


def test_a_sum_that_the_worker_did_not_write_is_not_returned():
    plan, _ = plan_with_worker()
    plan.request_added("a", 3, PREFILL)
    plan.step({"a": (0, 3)}, lambda _: [0])
    assert plan.request_finished("a", 4) is None
    assert plan.take_dropped() == 1


def test_a_sum_that_breaks_conservation_is_not_returned():
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, PREFILL)
    (job,) = plan.step({"a": (0, 3)}, lambda _: [0]).jobs
    worker.write(job.slot, job.part, job.ticket, 3, np.full((2, 6), 7, np.int32))
    assert plan.request_finished("a", 4) is None
    assert plan.take_dropped() == 1


def test_a_slot_that_went_to_another_request_does_not_answer_for_it():
    plan, worker = plan_with_worker(slots=1)
    counts = np.array([[3, 3, 0, 0, 0, 0], [0, 3, 3, 0, 0, 0]], np.int32)
    plan.request_added("a", 3, PREFILL)
    (job,) = plan.step({"a": (0, 3)}, lambda _: [0]).jobs
    plan.request_finished("a", 4)
    plan.request_added("b", 3, PREFILL)
    plan.step({"b": (0, 3)}, lambda _: [1])
    worker.write(job.slot, job.part, job.ticket, 3, counts)  # the aborted request's sum comes late
    assert plan.request_finished("b", 4) is None


def forwarded(plan, worker, start, tokens, ids):
    """One step of request `a` whose tokens choose `ids [tokens, L, k]`; returns the worker's job for ids."""
    step = plan.step({"a": (start, tokens)}, lambda _: [3, 7])
    for job in step.jobs:
        worker.write(job.slot, job.part, job.ticket, start + tokens, sum_of(3, ids) if job.part else sum_of(3))
    return step.ids


def sum_of(prompt_tokens, ids=()):
    """Counts of a prompt whose tokens all choose experts 0 and 1, and of output tokens."""
    counts = np.zeros((2, 6), np.int32)
    counts[:, :2] = prompt_tokens
    for layer in range(2):
        for row in ids:
            counts[layer, row[layer]] += 1
    return counts


OUTPUT_IDS = np.array([[[4, 1], [0, 5]], [[2, 3], [3, 1]]], np.uint8)


def test_ids_come_back_in_the_order_of_the_router_and_only_for_output_tokens():
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, IDS)
    assert forwarded(plan, worker, 0, 3, []) is None
    first = forwarded(plan, worker, 3, 1, OUTPUT_IDS[:1])
    worker.write_ids(first.page, first.ticket, OUTPUT_IDS[:1])
    second = forwarded(plan, worker, 4, 1, OUTPUT_IDS)
    worker.write_ids(second.page, second.ticket, OUTPUT_IDS[1:])
    assert (first.kv_slots, second.kv_slots) == ([3 * BLOCK + 3], [7 * BLOCK])
    assert first.page != second.page
    reply = plan.request_finished("a", 6)
    np.testing.assert_array_equal(read_routed_experts(reply[OUTPUT_IDS_KEY], GEOMETRY), OUTPUT_IDS)


def test_tokens_forwarded_again_replace_what_was_read_and_prompt_tokens_are_left_out():
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, IDS)
    forwarded(plan, worker, 0, 3, [])
    for start in (3, 4):
        job = forwarded(plan, worker, start, 1, OUTPUT_IDS[::-1][: start - 2])
        worker.write_ids(job.page, job.ticket, OUTPUT_IDS[::-1][start - 3 : start - 2])
    again = forwarded(plan, worker, 1, 4, OUTPUT_IDS)  # after a preemption
    assert again.kv_slots == [3 * BLOCK + 3, 7 * BLOCK]
    worker.write_ids(again.page, again.ticket, OUTPUT_IDS)
    reply = plan.request_finished("a", 6)
    np.testing.assert_array_equal(read_routed_experts(reply[OUTPUT_IDS_KEY], GEOMETRY), OUTPUT_IDS)


def test_an_output_of_one_token_has_no_ids_and_loses_none():
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, IDS)
    forwarded(plan, worker, 0, 3, [])
    reply = plan.request_finished("a", 4)
    assert read_routed_experts(reply[OUTPUT_IDS_KEY], GEOMETRY).shape == (0, 2, 2)
    assert plan.take_dropped() == 0


@pytest.mark.parametrize(
    "written",
    [None, OUTPUT_IDS[1:], np.array([[[4, 4], [0, 5]]], np.uint8), np.array([[[4, 9], [0, 5]]], np.uint8)],
    ids=["nothing", "another token", "an expert twice", "no such expert"],
)
def test_ids_that_are_not_what_was_counted_are_not_returned_and_the_counts_are(written):
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, IDS)
    forwarded(plan, worker, 0, 3, [])
    job = forwarded(plan, worker, 3, 1, OUTPUT_IDS[:1])
    if written is not None:
        worker.write_ids(job.page, job.ticket, written)
    reply = plan.request_finished("a", 5)
    assert reply[OUTPUT_IDS_KEY] is None
    assert decode_counts(reply[OUTPUT_KEY]).covered == 1
    assert plan.take_dropped() == 1


def test_the_shared_file_is_private_and_unlinked_as_soon_as_it_is_mapped():
    plan = CountsPlan(layout(2), BLOCK)
    assert plan._path.stat().st_mode & 0o077 == 0
    plan.step({}, lambda _: [])
    assert plan._path.exists()
    Slots.open(str(plan._path), layout(2)).announce(2)
    plan.step({}, lambda _: [])
    assert not plan._path.exists()
    plan.close()


def test_an_engine_that_never_ran_a_step_leaves_no_file():
    plan = CountsPlan(layout(2), BLOCK)
    plan.close()
    assert not plan._path.exists()


def test_a_hit_that_ends_within_a_block_does_not_keep_that_block():
    plan, _ = plan_with_worker()
    plan.prefix_looked_up("a", BLOCK + 1)
    plan.blocks_given("a", [5, 6, 7])
    assert plan.step({}, lambda _: []).restart == [6, 7]


def test_blocks_given_ahead_of_the_tokens_are_not_summed():
    plan, _ = plan_with_worker()
    plan.request_added("a", 3, PREFILL)
    (job,) = plan.step({"a": (0, 3)}, lambda _: [4, 5]).jobs
    assert job.blocks == [4]


def test_nothing_is_kept_of_requests_that_are_gone_nor_of_sums_that_were_overwritten():
    plan, _ = plan_with_worker()
    plan.request_added("a", 3, COUNTS)
    plan.prefix_looked_up("a", 0)
    for end in range(3, 12):
        plan.step({"a": (0, 3) if end == 3 else (end - 1, 1)}, lambda _: [0, 1, 2])
        assert len(plan._tracked["a"].totals) <= PARTS - 1
    plan.request_finished("a", 12)
    assert not plan._tracked
    assert not plan._local_blocks


def test_no_ids_are_kept_of_a_request_that_is_gone_though_a_page_still_names_it():
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, IDS)
    forwarded(plan, worker, 0, 3, [])
    for end in (4, 5):
        job = forwarded(plan, worker, end - 1, 1, OUTPUT_IDS[: end - 3])
        worker.write_ids(job.page, job.ticket, OUTPUT_IDS[end - 4 : end - 3])
    assert plan.request_finished("a", 6)[OUTPUT_IDS_KEY] is not None
    assert not any(run.owner for page in plan._ids._pages for run in page.runs)


def test_ids_of_an_output_that_was_counted_in_part_are_not_returned():
    plan, worker = plan_with_worker()
    plan.request_added("a", 3, IDS)
    forwarded(plan, worker, 0, 3, [])
    job = forwarded(plan, worker, 3, 1, OUTPUT_IDS[:1])
    worker.write_ids(job.page, job.ticket, OUTPUT_IDS[:1])
    (total,) = plan.step({"a": (4, 1)}, lambda _: [3, 7]).jobs  # neither counted nor written
    worker.write(total.slot, total.part, total.ticket, 4, sum_of(3, OUTPUT_IDS[:1]))
    reply = plan.request_finished("a", 6)
    assert (decode_counts(reply[OUTPUT_KEY]).tokens, decode_counts(reply[OUTPUT_KEY]).covered) == (2, 1)
    assert reply[OUTPUT_IDS_KEY] is None


def test_a_page_answers_for_its_own_step_alone_and_what_was_read_does_not_change():
    _, worker = plan_with_worker()
    worker.write_ids(0, 1, OUTPUT_IDS)
    assert worker.read_ids(0, 2, 0, 1) is None
    assert worker.read_ids(1, 1, 0, 1) is None
    read = worker.read_ids(0, 1, 1, 1)
    worker.write_ids(0, 3, np.zeros_like(OUTPUT_IDS))
    np.testing.assert_array_equal(read, OUTPUT_IDS[1:])


def test_a_sum_that_was_read_does_not_change_with_the_slot():
    _, worker = plan_with_worker()
    worker.write(0, 0, 1, 3, np.ones((2, 6), np.int32))
    _, counts = worker.read(0, 0, 1)
    worker.write(0, 0, 2, 3, np.zeros((2, 6), np.int32))
    assert counts.all()
