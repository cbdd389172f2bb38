"""Workers by themselves, with times worked out by hand."""

import pytest

from coterie.latency import StepTime, TokenTime
from coterie.sim.kernel import Priority
from coterie.sim.workers import PrefixCache
from sim_story import Story

# --- prefill ---


def test_prompts_that_are_there_when_a_step_begins_are_computed_together():
    story = Story()
    worker = story.prefill()
    for name in "ab":
        story.submit(worker, 0.0, story.task(name))
    story.submit(worker, 0.1, story.task("c"))
    story.kernel.run()
    # 0.5 s + 200 tokens x 1 ms; then 0.5 s + 100 tokens x 1 ms
    assert story.log == [("a", 0.7, True), ("b", 0.7, True), ("c", 1.3, True)]


def test_a_step_takes_no_more_prompts_than_its_budget_but_always_one():
    story = Story()
    worker = story.prefill(budget_tokens=150)
    for name, tokens in (("long", 400), ("a", 100), ("b", 50), ("c", 1)):
        story.submit(worker, 0.0, story.task(name, prompt_tokens=tokens))
    story.kernel.run()
    assert story.log == [("long", 0.9, True), ("a", 1.55, True), ("b", 1.55, True), ("c", 2.051, True)]


def test_a_prompt_that_is_cached_costs_its_last_block():
    story = Story()
    worker = story.prefill(cache_tokens=1000)
    for time_s in (0.0, 10.0):
        story.submit(worker, time_s, story.task("a"))
    story.kernel.run()
    # 99 // 16 = 6 blocks are kept, 4 tokens computed
    assert story.log == [("a", 0.6, True), ("a", 10.504, True)]


def test_the_cache_lets_the_least_recently_used_prompt_go():
    cache = PrefixCache(250, 16)
    cache.store("a", 100)
    cache.store("b", 100)
    cache.store("a", 100)
    cache.store("c", 100)
    assert [cache.cached(prompt, 100) for prompt in "abc"] == [96, 0, 96]
    assert cache.cached("a", 96) == 80  # whole blocks, and at least one token is computed
    cache.store("huge", 300)
    assert [cache.cached(prompt, 100) for prompt in ("a", "c", "huge")] == [0, 0, 0]


def test_a_lost_prefill_worker_leaves_all_undone_and_comes_back_without_its_cache():
    story = Story()
    worker = story.prefill(cache_tokens=1000)
    for time_s, name in ((0.0, "a"), (1.0, "a"), (1.1, "b"), (3.0, "a"), (5.0, "a")):
        story.submit(worker, time_s, story.task(name))
    story.kernel.at(1.2, Priority.CHANGE, worker.lose)
    story.kernel.at(4.0, Priority.CHANGE, worker.revive)
    story.kernel.run()
    assert story.log == [("a", 0.6, True), ("a", 1.2, False), ("b", 1.2, False), ("a", 3.0, False), ("a", 5.6, True)]


# --- decode ---


def test_a_request_alone_takes_a_step_for_each_token():
    story = Story()
    group = story.group()
    task = story.task("a", output_tokens=3)
    story.submit(group.ranks[0], 2.0, task)
    story.kernel.run()
    # 1 s + 1 request x 0.1 s + half an expert x 0.2 s = 1.2 s
    assert task.first_token_s == pytest.approx(3.2)
    assert story.log == [("a", 5.6, True)]
    assert (group.totals.steps, group.totals.requests) == (3, 3)
    assert group.totals.active == pytest.approx(1.5)
    assert group.totals.busy_s == pytest.approx(3.6)


def test_one_that_comes_during_a_step_joins_the_next():
    story = Story()
    worker = story.decode()
    story.submit(worker, 0.0, story.task("a", output_tokens=2))
    story.submit(worker, 0.5, late := story.task("b", position=1, output_tokens=1))
    story.kernel.run()
    # a alone: 1.2 s; both: 1 + 2 x 0.1 + (0.5 + 1) x 0.2 = 1.5 s
    assert late.first_token_s == pytest.approx(2.7)
    assert story.log == [("a", 2.7, True), ("b", 2.7, True)]


def test_one_whose_kv_arrives_as_a_step_ends_joins_the_next():
    story = Story()
    worker = story.decode(time=StepTime(1.0, 0.0, 0.0))  # the step's end and the arrivals are the same moment
    for time_s, name in ((0.0, "a"), (1.0, "b"), (1.0, "c")):
        story.submit(worker, time_s, story.task(name, output_tokens=1))
    story.kernel.run()
    assert story.log == [("a", 1.0, True), ("b", 2.0, True), ("c", 2.0, True)]


def test_a_full_batch_lets_others_wait_in_their_order():
    story = Story()
    worker = story.decode(most=1)
    for name in "abc":
        story.submit(worker, 0.0, story.task(name))
    story.kernel.run()
    assert story.log == [("a", 1.2, True), ("b", 2.4, True), ("c", 3.6, True)]


def test_the_handoff_takes_its_time_and_does_not_hold_others_up():
    story = Story()
    worker = story.decode(handoff=TokenTime(0.1, 0.01))
    story.submit(worker, 0.0, story.task("long", prompt_tokens=500))
    story.submit(worker, 0.0, story.task("short", prompt_tokens=10))
    story.kernel.run()
    # short: 0.2 s, then a step of 1.2 s; long: 5.1 s, then the same
    assert story.log == [("short", 1.4, True), ("long", 6.3, True)]


def test_a_lost_decode_worker_leaves_all_undone_once():
    story = Story()
    worker = story.decode(most=1, handoff=TokenTime(0.1, 0.0))
    story.submit(worker, 0.0, story.task("decoding", output_tokens=9))
    story.submit(worker, 0.0, story.task("waiting"))
    story.submit(worker, 0.95, story.task("pulling"))
    story.submit(worker, 1.5, story.task("refused"))
    story.submit(worker, 2.5, story.task("after"))
    story.kernel.at(1.0, Priority.CHANGE, worker.lose)
    story.kernel.at(2.0, Priority.CHANGE, worker.revive)
    story.kernel.run()
    assert story.log == [
        ("decoding", 1.0, False),
        ("waiting", 1.0, False),
        ("pulling", 1.0, False),
        ("refused", 1.5, False),
        ("after", 3.8, True),
    ]
    assert (worker.queued, worker.running) == (0, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_of_a_lost_worker_ends_nothing_of_its_next_life(role):
    story = Story()
    worker = getattr(story, role)()
    story.submit(worker, 0.0, story.task("before"))
    story.kernel.at(0.1, Priority.CHANGE, worker.lose)
    story.kernel.at(0.2, Priority.CHANGE, worker.revive)
    story.submit(worker, 0.2, story.task("after"))
    story.kernel.run()
    whole_step_s = {"prefill": 0.6, "decode": 1.2}[role]
    assert story.log == [("before", 0.1, False), ("after", 0.2 + whole_step_s, True)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_lost_and_back_in_one_moment_begins_one_step(role):
    story = Story()
    worker = story.prefill() if role == "prefill" else (group := story.group()).ranks[0]
    story.submit(worker, 0.0, story.task("before"))
    for action, *arguments in ((worker.lose,), (worker.revive,), (worker.submit, story.task("after"))):
        story.kernel.at(0.0, Priority.ARRIVAL, story.kernel.after, 0, Priority.ARRIVAL, action, *arguments)
    story.kernel.run()
    assert story.log == [("before", 0.0, False), ("after", {"prefill": 0.6, "decode": 1.2}[role], True)]
    assert role == "prefill" or group.totals.steps == 1
