"""Decode groups by themselves: CUDA graphs, KV blocks and ranks, with times worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.latency import StepTime, TokenTime
from coterie.placement import Placement
from coterie.sim.decode import _padded
from coterie.sim.kernel import Priority
from sim_story import Story

SECONDS = StepTime(1.0, 0.0, 0.0)

# --- CUDA graphs ---


def test_a_batch_costs_what_the_next_captured_size_costs():
    story = Story()
    group = story.group(graph_sizes=(2, 4))
    for name in "abc":
        story.submit(group.ranks[0], 0.0, story.task(name))
    story.kernel.run()
    # 1 + 4 x 0.1 + (1 - 0.5^3) x 0.2 = 1.575 s; the padding activates no expert
    assert [time for _, time, _ in story.log] == [pytest.approx(1.575)] * 3
    assert group.totals.requests == 3


def test_sizes_are_padded_to_the_next_graph_and_run_as_they_are_beyond_the_largest():
    assert _padded((1, 2, 4, 8), 10) == (0, 1, 2, 4, 4, 8, 8, 8, 8, 9, 10)
    assert _padded((), 3) == (0, 1, 2, 3)


# --- KV blocks ---


def test_the_last_that_joined_is_preempted_and_computed_anew_when_there_is_room():
    story = Story()
    group = story.group(time=SECONDS, kv_tokens=16, block_tokens=4)
    task = {name: story.task(name, prompt_tokens=7, output_tokens=6) for name in "ab"}
    for name in "ab":
        story.submit(group.ranks[0], 0.0, task[name])
    story.kernel.run()
    # Of 4 blocks each takes 2 (7 prompt tokens and the first step's).  The second step needs a third for each: b has to
    # go, with one token.  a takes its fourth block for its sixth step and ends at 6 s.  b then needs 3 blocks (7 + 1
    # tokens and the step's); its step takes 0.5 s + 8 x 1 ms longer, and 4 more follow.
    assert story.log == [("a", 6.0, True), ("b", 11.508, True)]
    assert (task["a"].first_token_s, task["b"].first_token_s) == (1.0, 1.0)
    assert (group.totals.preemptions, group.totals.steps) == (1, 11)


def test_a_task_without_room_waits_with_its_handoff_and_those_behind_it_wait_too():
    story = Story()
    rank = story.decode(time=SECONDS, handoff=TokenTime(0.25, 0.0), kv_tokens=16, block_tokens=4)
    for name, tokens in (("a", 11), ("large", 7), ("small", 1)):
        story.submit(rank, 0.0, story.task(name, prompt_tokens=tokens))
    story.kernel.run()
    # a holds 3 of 4 blocks until 1.25 s; small would fit, but large came first.
    assert story.log == [("a", 1.25, True), ("large", 2.5, True), ("small", 2.5, True)]


def test_one_that_decodes_alone_gives_way_to_those_whose_kv_is_there():
    story = Story()
    group = story.group(time=SECONDS, most=1, kv_tokens=12, block_tokens=4)
    for name in "ab":
        story.submit(group.ranks[0], 0.0, story.task(name, prompt_tokens=3, output_tokens=9))
    story.kernel.run()
    assert sorted(name for name, _, done in story.log if done) == ["a", "b"]
    assert group.totals.preemptions > 0


def test_a_lost_worker_loses_those_without_room_too_and_has_all_its_room_afterwards():
    story = Story()
    rank = story.decode(time=SECONDS, kv_tokens=16, block_tokens=4)
    for name in "abc":
        story.submit(rank, 0.0, story.task(name, prompt_tokens=7, output_tokens=9))
    story.kernel.at(3.5, Priority.CHANGE, rank.lose)
    story.kernel.at(4.0, Priority.CHANGE, rank.revive)
    story.submit(rank, 5.0, story.task("after", prompt_tokens=12, output_tokens=4))
    story.kernel.run()
    assert sorted(story.log[:3]) == [(name, 3.5, False) for name in "abc"]
    assert story.log[3:] == [("after", 9.0, True)]


TASKS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(tasks=TASKS, blocks=st.integers(6, 12), most=st.integers(1, 4), handoff_s=st.sampled_from([0.0, 1.5]))
def test_every_task_ends_with_all_its_tokens_and_all_blocks_are_free_again(tasks, blocks, most, handoff_s):
    story = Story()
    sizes = {"most": most, "kv_tokens": 4 * blocks, "block_tokens": 4, "handoff": TokenTime(handoff_s, 0.0)}
    group = story.group(time=SECONDS, **sizes)
    (rank,) = group.ranks
    for number, (time_s, prompt_tokens, output_tokens) in enumerate(tasks):
        task = story.task(number, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        story.submit(rank, float(time_s), task)
    while story.kernel.step():
        assert 0 <= rank._kv.free <= blocks
    assert sorted(name for name, _, done in story.log if done) == list(range(len(tasks)))
    assert rank._kv.free == blocks
    assert group.totals.requests == sum(output for _, _, output in tasks)  # no token is given twice
    assert (rank.queued, rank.running) == (0, 0)


# --- ranks ---


def test_ranks_step_together_and_wait_for_the_one_with_most_experts_and_the_one_with_most_requests():
    story = Story()
    group = story.group(ranks=2)
    tasks = [("a", 0, 0), ("b", 1, 1), ("c", 0, 0)]  # name, rank, position
    for name, rank, position in tasks:
        story.submit(group.ranks[rank], 0.0, story.task(name, position=position))
    story.kernel.run()
    # Experts 0 and 1 of 4 are on rank 0: 1 s + 2 requests x 0.1 + (0.75 + 1) x 0.2 = 1.55 s for all.
    assert story.log == [("a", 1.55, True), ("c", 1.55, True), ("b", 1.55, True)]
    assert (group.totals.steps, group.totals.requests) == (1, 3)
    assert group.totals.busiest == pytest.approx(1.75)


def test_another_placement_of_the_experts_makes_steps_shorter():
    story = Story()
    group = story.group(ranks=2, placement=Placement(np.array([[0, 2, 1, 3]]), np.array([0, 0, 1, 1]), np.ones((1, 4))))
    for rank, name in enumerate("ab"):
        story.submit(group.ranks[rank], 0.0, story.task(name, position=rank))
    story.kernel.run()
    # Half of expert 0 on rank 0, expert 1 on rank 1: 1 s + 0.1 + 1 x 0.2
    assert story.log == [("a", 1.3, True), ("b", 1.3, True)]
    assert (group.totals.active, group.totals.busiest) == (pytest.approx(1.5), pytest.approx(1.0))


def test_a_lost_rank_loses_the_group_and_all_come_back_together():
    story = Story()
    group = story.group(ranks=2)
    for rank, name in enumerate("ab"):
        story.submit(group.ranks[rank], 0.0, story.task(name))
        story.submit(group.ranks[rank], 0.7, story.task(f"{name} refused"))
    story.kernel.at(0.5, Priority.CHANGE, group.ranks[1].lose)
    story.kernel.at(1.0, Priority.CHANGE, group.ranks[0].revive)
    story.submit(group.ranks[1], 1.0, story.task("after"))
    story.kernel.run()
    assert sorted(story.log[:2]) == [("a", 0.5, False), ("b", 0.5, False)]
    assert sorted(story.log[2:4]) == [("a refused", 0.7, False), ("b refused", 0.7, False)]
    assert story.log[4:] == [("after", 2.2, True)]


def test_each_rank_has_places_and_blocks_of_its_own():
    story = Story()
    group = story.group(time=SECONDS, ranks=2, most=1)
    for name, rank in (("a", 0), ("b", 0), ("c", 1)):
        story.submit(group.ranks[rank], 0.0, story.task(name))
    story.kernel.run()
    assert story.log == [("a", 1.0, True), ("c", 1.0, True), ("b", 2.0, True)]
