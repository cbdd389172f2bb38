"""Who runs when: decoding first, the earliest first, and nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_model import BLOCK

from coterie.engines.embedded.blocks import BlockPool
from coterie.engines.embedded.request import Request, Submission
from coterie.engines.embedded.sampling import SamplingParams
from coterie.engines.embedded.scheduler import Limits, Scheduler
from coterie.errors import ConfigError


def request(arrival, prompt, limit=100, load_tokens=0):
    tokens = list(prompt) if not isinstance(prompt, int) else [arrival % 1000] * prompt
    submission = Submission(f"r{arrival}", tuple(tokens), SamplingParams())
    return Request(submission, arrival, limit, submission.params, frozenset(), tokens, load_tokens=load_tokens)


def scheduler(blocks=64, **limits):
    return Scheduler(BlockPool(blocks, BLOCK), Limits(**limits))


def take(plan):
    """A step as {request id: (start, length)}."""
    return {work.request.id: (work.start, work.length) for work in plan.work}


def step(own, token=0):
    """Plan a step, compute it, and let every request that can sample a token do so; the step."""
    plan = own.plan()
    own.done(plan)
    for work in plan.work:
        if work.start + work.length == len(work.request.tokens):
            work.request.tokens.append(token)
    own.pool.check()
    return plan


def test_limits_that_cannot_work_are_named():
    with pytest.raises(ConfigError, match="at most 0 running requests"):
        Limits(running=0)
    with pytest.raises(ConfigError, match="7 tokens a step for 8 running requests; raise the tokens or lower"):
        Limits(running=8, step_tokens=7)


def test_a_prompt_is_computed_in_chunks_beside_those_that_decode():
    own = scheduler(running=3, step_tokens=6)
    own.add(request(0, 5))
    own.add(request(1, 9))
    own.add(request(2, 2))
    assert take(step(own)) == {"r0": (0, 5), "r1": (0, 1)}
    assert take(step(own)) == {"r0": (5, 1), "r1": (1, 5)}
    assert take(step(own)) == {"r0": (6, 1), "r1": (6, 3), "r2": (0, 2)}
    assert take(step(own)) == {"r0": (7, 1), "r1": (9, 1), "r2": (2, 1)}


def test_no_more_run_than_allowed():
    own = scheduler(running=2, step_tokens=50)
    for number in range(3):
        own.add(request(number, 3))
    assert take(step(own)).keys() == {"r0", "r1"}
    assert (own.running, own.waiting) == (2, 1)


def test_the_youngest_gives_its_blocks_up_and_comes_back_before_later_ones():
    own = scheduler(blocks=5, running=4, step_tokens=50)
    old, young, later = request(0, 3), request(1, 3), request(2, 3)
    own.add(old)
    own.add(young)
    while own.tally.preemptions == 0:
        step(own)
    own.add(later)
    assert (young.blocks, young.computed, len(old.blocks)) == ([], 0, 3)
    own.remove(old)
    plan = own.plan()
    assert list(take(plan)) == ["r1", "r2"]
    assert take(plan)["r1"] == (8, len(young.tokens) - 8)  # what was cached is not computed again


def test_a_request_is_not_admitted_only_to_be_preempted():
    own = scheduler(blocks=3, running=4, step_tokens=50)
    own.add(request(0, 4))
    own.add(request(1, 8))
    step(own)  # two blocks are free, but the first is about to need one of them
    assert (own.running, own.waiting) == (1, 1)


def test_a_prompt_that_was_preempted_half_way_is_taken_up_from_what_is_cached():
    own = scheduler(blocks=5, running=2, step_tokens=2)
    old, young = request(0, [9, 9, 9]), request(1, range(12))
    own.add(old)
    own.add(young)
    while own.tally.preemptions == 0:
        step(own)
    assert (young.blocks, len(old.blocks)) == ([], 3)
    own.remove(old)
    assert take(own.plan()) == {"r1": (4, 2)}


def test_a_request_alone_that_needs_a_block_of_others_waits_for_it():
    own = scheduler(blocks=3, running=4, step_tokens=50)
    loading, decoding = request(0, 8, load_tokens=8), request(1, 4)
    own.add(loading)
    own.add(decoding)
    assert take(step(own)) == {"r1": (0, 4)}
    assert own.plan().work == ()  # the blocks that are loading cannot be taken away
    own.loaded(loading)
    assert take(step(own)) == {"r0": (7, 1)}


def test_a_later_prompt_waits_for_what_is_being_computed_and_others_pass():
    own = scheduler(running=4, step_tokens=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    own.add(request(0, prompt))
    own.add(request(1, [*prompt, 10]))
    assert take(step(own)) == {"r0": (0, 4)}
    assert take(step(own)) == {"r0": (4, 4)}
    own.add(request(2, [9, 9]))
    assert take(step(own)) == {"r0": (8, 1), "r1": (8, 2), "r2": (0, 1)}


def test_a_preempted_or_removed_request_is_not_waited_for():
    own = scheduler(running=4, step_tokens=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    first = request(0, prompt)
    own.add(first)
    own.add(request(1, prompt))
    step(own)
    own.remove(first)
    assert take(step(own)) == {"r1": (4, 4)}


def test_a_load_does_not_wait_for_what_is_being_computed():
    own = scheduler(running=4, step_tokens=40)
    own.add(request(0, [1] * 9))
    own.add(request(1, [1] * 9, load_tokens=9))
    plan = own.plan()
    assert [(job.request_id, job.first, len(job.blocks)) for job in plan.loads] == [("r1", 0, 3)]
    assert set(plan.loads[0].blocks) <= set(plan.fresh)


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=25)


@given(lengths, st.integers(8, 20), st.integers(1, 6), st.integers(0, 20), st.booleans())
def test_everything_that_fits_alone_is_finished_in_bounded_time(sizes, blocks, running, extra, alike):
    own = scheduler(blocks=blocks, running=running, step_tokens=running + extra)
    waiting = []
    for number, (prompt, output) in enumerate(sizes):
        waiting.append(request(number, [1] * prompt if alike else prompt, output))
        own.add(waiting[-1])
    oldest_waits, tokens = 0, 0
    while waiting:
        plan = step(own)
        assert plan.work, "nothing to do, and something waits"
        tokens += sum(work.length for work in plan.work)
        oldest_waits = 0 if any(work.request is waiting[0] for work in plan.work) else oldest_waits + 1
        # The oldest waits for at most the chunks of a prompt whose blocks it is about to find.
        assert oldest_waits <= 20
        for done in [one for one in waiting if one.output_tokens == one.limit]:
            own.remove(done)
            waiting.remove(done)
    assert own.pool.held == 0
    assert (own.running, own.waiting) == (0, 0)
