"""What the engine computes does not depend on how: caching, chunks, batches, preemption, loads and aborts.

The truth is computed without an engine, one request at a time (`toy_model`).
"""

from __future__ import annotations

import numpy as np
import pytest
import toy_model
from toy_model import BLOCK, END, PROMPTS, VOCAB, Story, ToyText, counts_of, expected_tokens, experts_of, params_of

from coterie import wire
from coterie.engines.embedded.engine import EngineConfig
from coterie.engines.embedded.live import Live
from coterie.engines.embedded.request import Request, Submission
from coterie.engines.embedded.sampling import SamplingParams
from coterie.errors import ConfigError, EngineError, RequestError
from coterie.modeling import PartError
from waiting import wait_until


def submit_all(story, **changes):
    for number, prompt in enumerate(PROMPTS):
        story.submit(f"r{number}", prompt, **params_of(number, **changes))


def check_all(story):
    for number, prompt in enumerate(PROMPTS):
        expected = expected_tokens(prompt, SamplingParams(**params_of(number)))
        assert story.tokens(f"r{number}") == expected
        finish = story.finish(f"r{number}")
        assert finish.reason == ("stop" if expected[-1] == END and number % 4 != 2 else "length")
        assert (finish.prompt_tokens, finish.output_tokens) == (len(prompt), len(expected))
    assert story.pool.held == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("step_tokens", [3, 5, 1000])
@pytest.mark.parametrize(("running", "blocks"), [(1, 64), (3, 64), (3, 12)])
def test_outputs_are_those_of_each_request_alone(prefix_caching, step_tokens, running, blocks):
    story = Story(blocks, prefix_caching=prefix_caching, step_tokens=step_tokens, running=running)
    for _ in range(2):  # the second time much of it is cached
        submit_all(story)
        story.run()
        check_all(story)
    stats = story.engine.stats()
    assert story.model.largest_step <= step_tokens
    assert (stats.preemptions > 0) == (running == 3 and blocks == 12)
    assert (stats.prefix_hits > 0) == prefix_caching


def test_a_step_whose_experts_are_not_there_ends_its_requests_and_no_others(monkeypatch):
    story = Story(running=3, step_tokens=64)
    for number in range(5):
        story.submit(f"r{number}", [number, 1, 2], max_tokens=4, ignore_eos=True)
    story.engine.step()

    def fails(batch, kv):
        raise PartError("no reply by the deadline", slice(0, 3))

    with monkeypatch.context() as broken:
        broken.setattr(story.model, "forward", fails)
        story.engine.step()
    story.run()
    ends = [story.finish(f"r{number}") for number in range(5)]
    assert [(end.reason, end.problem) for end in ends[:3]] == [("error", "no reply by the deadline")] * 3
    for number in (3, 4):
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        assert story.tokens(f"r{number}") == expected_tokens([number, 1, 2], params)
    assert story.pool.held == 0


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [([slice(0, 7)], "ab"), ([slice(7, 14)], "bcd"), ([slice(12, 14)], "d"), ([slice(0, 1), slice(12, 14)], "ad")],
)
def test_half_a_step_whose_experts_are_not_there_ends_its_requests_and_the_rest_is_computed_again(
    monkeypatch, tokens, ends
):
    prompts = {"a": [1], "b": [2, 3, 4, 5, 6, 0, 1, 2], "c": [3, 1, 2], "d": [4, 1]}  # tokens 0, 1-8, 9-11, 12-13
    story = Story(running=4, step_tokens=64)
    for name, prompt in prompts.items():
        story.submit(name, prompt, max_tokens=6, ignore_eos=True, asked="counts")

    def fails(batch, kv):
        assert len(batch.token_ids) == 14
        raise PartError("no reply by the deadline", *tokens)

    with monkeypatch.context() as broken:
        broken.setattr(story.model, "forward", fails)
        assert story.engine.step()
    assert [name for name in prompts if story.heard[name]] == list(ends)
    story.run()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for name, prompt in prompts.items():
        finish = story.finish(name)
        if name in ends:
            assert (finish.reason, finish.problem) == ("error", "no reply by the deadline")
        else:
            assert story.tokens(name) == expected_tokens(prompt, params)
            text = [*prompt, *story.tokens(name)]
            np.testing.assert_array_equal(finish.output_counts.counts, counts_of(text, len(prompt), len(text) - 1))
    assert story.pool.held == 0
    assert story.model.forwarded == sum(len(prompts[name]) + 5 for name in prompts if name not in ends)


def test_few_blocks_force_preemptions_that_change_nothing():
    story, params = Story(12, running=6, step_tokens=64), {"max_tokens": 30, "ignore_eos": True}
    for number in range(6):
        story.submit(f"r{number}", [number, 1, 2], temperature=1.0, seed=number, **params)
    story.run()
    for number in range(6):
        alone = expected_tokens([number, 1, 2], SamplingParams(seed=number, **params))
        assert story.tokens(f"r{number}") == alone
    assert story.engine.stats().preemptions >= 3
    assert story.finish("r0").output_tokens == 30


def test_outputs_of_one_prompt_share_its_blocks_and_draw_differently():
    prompt, params = list(range(7)) * 3, {"temperature": 1.5, "seed": 4, "max_tokens": 6}
    story = Story(running=8)
    for choice in range(4):
        story.submit(f"n{choice}", prompt, choice=choice, **params)
    story.engine.step()
    assert (story.engine.stats().running, story.engine.stats().waiting) == (1, 3)  # they wait for the first's blocks
    story.engine.step()
    assert story.engine.stats().running == 4
    assert story.pool.held == 6 + 3 * 1  # 21 tokens: 5 full blocks shared, one of its own each
    story.run()
    outputs = [story.tokens(f"n{choice}") for choice in range(4)]
    assert outputs == [expected_tokens(prompt, SamplingParams(**params), choice) for choice in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    assert story.model.forwarded == 21 + 3 * 1 + sum(len(output) - 1 for output in outputs)


def test_a_shared_prompt_is_computed_by_the_next_when_the_first_is_aborted():
    prompt = [1, 2, 3] * 6
    story = Story(step_tokens=8, running=8)
    for name in "abc":
        story.submit(name, prompt, max_tokens=3)
    story.engine.step()
    story.engine.abort("a")
    story.run()
    assert (
        story.tokens("b") == story.tokens("c") == expected_tokens(prompt, SamplingParams(temperature=0, max_tokens=3))
    )
    assert story.finish("c").cached_tokens == 16


# --- experts ----------------------------------------------------------------------------------------


def test_figures_of_a_step_at_hand_are_not_in_yet_in_any_of_its_counters():
    """Else a reader in another thread would divide the experts of n + 1 steps by n."""
    story = Story()
    seen = []

    def look(_output):
        stats = story.engine.stats()
        seen.append((stats.steps, stats.step_tokens, sum(stats.active_experts) > 0))

    story.engine.submit(
        Submission("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)), look
    )
    story.run()
    assert seen == [(0, 0, False), (1, 3, True), (2, 4, True)]


def test_counts_are_the_truth_whatever_was_cached_chunked_or_preempted():
    story = Story(11, running=6, step_tokens=7)
    for turn in range(3):
        for number, prompt in enumerate(PROMPTS):
            asked = wire.ASK_IDS if number % 2 else wire.ASK_COUNTS
            story.submit(f"{turn}.{number}", prompt, asked=asked, **params_of(number))
        story.run()
    stats = story.engine.stats()
    assert min(stats.preemptions, stats.prefix_hits) > 0
    for turn in range(3):
        for number, prompt in enumerate(PROMPTS):
            check_experts(story, f"{turn}.{number}", prompt)


def check_experts(story, name, prompt):
    finish, tokens = story.finish(name), prompt + story.tokens(name)
    assert finish.prompt_counts.complete
    assert np.array_equal(finish.prompt_counts.counts, counts_of(tokens, 0, len(prompt)))
    assert finish.output_counts.tokens == len(tokens) - len(prompt) - 1  # the last was not forwarded
    assert np.array_equal(finish.output_counts.counts, counts_of(tokens, len(prompt), len(tokens) - 1))
    if finish.output_ids is not None:
        truth = [experts_of(tuple(tokens[: end + 1])) for end in range(len(prompt), len(tokens) - 1)]
        assert np.array_equal(finish.output_ids, np.array(truth).reshape(-1, 2, 2))


def test_the_output_of_one_turn_is_counted_as_the_prompt_of_the_next():
    story, prompt = Story(14, running=2), [1, 2, 3]
    for turn in range(6):
        name = f"turn{turn}"
        story.submit(name, prompt, temperature=1.0, seed=turn, max_tokens=6, ignore_eos=True, asked=wire.ASK_COUNTS)
        story.submit(f"other{turn}", [turn] * 9, max_tokens=12)  # so that blocks change hands
        story.run()
        assert story.finish(name).cached_tokens == (0 if turn == 0 else (len(prompt) - 2) // BLOCK * BLOCK)
        check_experts(story, name, prompt)
        prompt = [*prompt, *story.tokens(name), turn]


def test_envelopes_carry_what_was_asked_for():
    story = Story()
    for name, asked in [("none", None), ("counts", wire.ASK_COUNTS), ("ids", wire.ASK_IDS)]:
        story.submit(name, [1, 2, 3], asked=asked, max_tokens=4, ignore_eos=True)
    story.run()
    assert story.finish("none").envelopes() == {}
    assert story.finish("counts").envelopes().keys() == {wire.PROMPT_KEY, wire.OUTPUT_KEY}
    envelopes = story.finish("ids").envelopes()
    assert wire.decode_counts(envelopes[wire.PROMPT_KEY]).tokens == 3
    ids = wire.read_routed_experts(envelopes[wire.OUTPUT_IDS_KEY], story.model.geometry)
    assert np.array_equal(wire.count_ids(ids, 6), wire.decode_counts(envelopes[wire.OUTPUT_KEY]).counts)


def test_active_experts_are_those_that_a_step_used():
    story = Story()
    story.submit("a", [1, 2], max_tokens=2, ignore_eos=True)
    story.submit("b", [3], max_tokens=1)
    story.run()
    first = [experts_of((1,)), experts_of((1, 2)), experts_of((3,))]
    second = [experts_of((1, 2, story.tokens("a")[0]))]
    used = [sum(len({int(i) for ids in step for i in ids[layer]}) for step in (first, second)) for layer in (0, 1)]
    stats = story.engine.stats()
    assert stats.active_experts == tuple(used)
    assert (stats.steps, stats.step_tokens, stats.prompt_tokens, stats.output_tokens) == (2, 4, 3, 3)


# --- ends -------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_output_and_is_not_shown():
    params = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 60}
    story = Story()
    story.submit("whole", [1], **params)
    story.run()
    whole = story.text("whole")
    stop = whole[9:12]
    place = whole.index(stop)
    assert len(whole) > 40
    story.submit("cut", [1], stop=(stop,), **params)
    story.run()
    finish = story.finish("cut")
    assert (story.text("cut"), finish.reason, finish.stop_reason) == (whole[:place], "stop", stop)
    assert finish.output_tokens < 60
    story.submit("late", [1], stop=(stop,), min_tokens=59, **params)
    story.run()
    assert story.finish("late").reason == "length"
    assert story.text("late") == whole  # what was held back is shown at the end


@pytest.mark.parametrize(("least", "reason"), [(2, "stop"), (3, None)])
def test_a_stop_string_counts_from_the_token_after_the_least_length(least, reason):
    params = SamplingParams(stop=("abc",), min_tokens=least, max_tokens=9)
    request = Request(Submission("r", [1], params), 0, 9, params, frozenset(), [1])
    live = Live(request, print, ToyText().detokenizer())
    assert [live.advance(token) for token in (0, 1)] == [("", None, None)] * 2
    assert live.advance(2) == (("", "stop", "abc") if reason else ("abc", None, None))


def test_what_was_held_back_is_shown_when_the_output_reaches_its_limit():
    story = Story()
    story.submit("whole", [1], max_tokens=12, ignore_eos=True)
    story.run()
    whole = story.text("whole")
    story.submit("held", [1], max_tokens=12, ignore_eos=True, stop=(whole[-2:] + "never",))
    story.run()
    assert (story.text("held"), story.finish("held").reason) == (whole, "length")
    assert story.heard["held"][-1].text.endswith(whole[-2:])


def test_a_stop_token_is_counted_and_not_shown():
    prompt, params = [1, 2], {"temperature": 1.0, "seed": 1, "ignore_eos": True, "max_tokens": 50}
    tokens = expected_tokens(prompt, SamplingParams(**params))
    story = Story()
    story.submit("a", prompt, stop_token_ids=frozenset({2}), **params)
    story.run()
    assert story.tokens("a") == tokens[: tokens.index(2) + 1]
    assert story.finish("a").stop_reason == 2
    assert not story.text("a").endswith("c")


def test_an_end_token_of_the_model_has_no_stop_reason():
    story = Story()
    story.submit("a", [1], temperature=2.0, seed=1, max_tokens=100)
    story.run()
    assert (story.finish("a").reason, story.finish("a").stop_reason) == ("stop", None)
    assert story.tokens("a")[-1] == END


def test_the_output_fills_model_and_cache_where_no_limit_is_given():
    story = Story(5, max_model_len=100)  # 20 tokens are forwarded, and one more is sampled
    story.submit("a", [1, 2, 3], ignore_eos=True)
    story.run()
    assert len(story.tokens("a")) == 18
    story = Story(64, max_model_len=17)
    story.submit("a", [1, 2, 3], ignore_eos=True)
    story.run()
    assert len(story.tokens("a")) == 14


# --- what is refused --------------------------------------------------------------------------------


def test_a_request_that_can_never_run_is_refused_with_its_lengths_and_a_remedy():
    story = Story(5, max_model_len=100)
    story.submit("fits", [1] * 15, max_tokens=6, ignore_eos=True)
    with pytest.raises(
        RequestError, match=r"the prompt has 15 tokens and the output up to 7, together 22, but"
    ) as caught:
        story.submit("a", [1] * 15, max_tokens=7)
    assert "the cache holds 5 blocks of 4, so 21; shorten the prompt or lower max_tokens" in str(caught.value)
    assert "or start the engine with more blocks" in str(caught.value)
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match=r"output up to 1, together 101, but the model takes 100; shorten") as caught:
        story.submit("b", [1] * 100)
    assert caught.value.param == "prompt"
    story.run()
    assert story.finish("fits").reason == "length"


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt: it has no tokens"),
        ([1, VOCAB], {}, "prompt: 8 is not a token; they are 0 to 7"),
        ([-1], {}, "prompt: -1 is not a token"),
        ([1], {"stop_token_ids": frozenset({3, 99})}, "stop_token_ids: 99 is not a token"),
        ([1], {"stop_token_ids": frozenset(range(7)), "min_tokens": 1}, "min_tokens: every token would end"),
        ([1, 2], {"load_tokens": 3}, "cannot load 3 of 2 tokens"),
    ],
)
def test_a_malformed_request_is_refused(prompt, fields, message):
    story = Story()
    with pytest.raises(RequestError, match=message):
        story.submit("a", prompt, **fields)
    assert story.engine.step() is False


def test_an_id_in_use_is_refused_until_its_blocks_are_free():
    story = Story()
    story.submit("a", [1], max_tokens=1, keep=True)
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        story.submit("a", [1])
    story.run()
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        story.submit("a", [1])
    story.engine.release_handoff("a")
    story.submit("a", [1], max_tokens=1)


def test_sizes_out_of_range_are_named():
    with pytest.raises(ConfigError, match="max_model_len is 1"):
        EngineConfig(1, 1, 1)
    for lease_s in (0, -1, float("nan"), float("inf"), 1e12):  # the engine could not wait for the last ones
        with pytest.raises(ConfigError, match=f"lease_s is {lease_s}"):
            EngineConfig(1, 1, 2, lease_s)


# --- prefill here, decode there ---------------------------------------------------------------------


def test_a_kept_prompt_holds_its_blocks_until_it_is_released():
    story = Story()
    story.submit("p", [1, 2, 3, 4, 5], max_tokens=1, keep=True)
    story.run()
    finish = story.finish("p")
    assert (finish.kept.tokens, len(finish.kept.blocks)) == (5, 2)
    assert finish.prompt_counts.complete
    assert finish.kept.expires_s == story.clock.now() + 30
    assert story.kv[list(finish.kept.blocks)].reshape(-1)[:5].tolist() == [1, 2, 3, 4, 5]
    story.run()
    assert (story.pool.held, story.engine.stats().kept) == (2, 1)
    assert story.engine.release_handoff("p") is True
    assert story.engine.release_handoff("p") is False
    story.run()
    assert (story.pool.held, story.engine.stats().kept) == (0, 0)


def test_a_lease_runs_out_unless_it_is_renewed():
    story = Story(lease_s=10)
    story.submit("p", [1, 2, 3], max_tokens=1, keep=True)
    story.run()
    story.clock.advance(9)
    assert story.engine.renew_handoff("p") is True
    story.clock.advance(9.9)
    story.run()
    assert story.pool.held == 1
    story.clock.advance(0.1)
    story.run()
    assert story.pool.held == 0
    assert story.engine.renew_handoff("p") is False


def test_an_aborted_prefill_keeps_nothing():
    story = Story(step_tokens=4, running=4)
    story.submit("p", [1] * 12, max_tokens=1, keep=True)
    story.engine.step()
    story.engine.abort("p")
    story.run()
    assert story.finish("p").kept is None
    story.submit("q", [1] * 12, max_tokens=1, keep=True)
    story.run()
    story.engine.abort("q")  # too late for its reply, in time for its blocks
    story.run()
    assert story.pool.held == 0


@pytest.mark.parametrize("length", [1, 4, 7, 8, 9])
def test_a_loaded_prompt_decodes_as_one_computed_here(length):
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2][:length]
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 9}
    story = Story()
    story.submit("d", prompt, load_tokens=length, asked=wire.ASK_IDS, **params)
    story.run()
    assert (story.engine.stats().loading, story.engine.stats().running) == (1, 0)
    (job,) = story.jobs
    assert (job.first, len(job.blocks)) == (0, -(-length // BLOCK))
    story.fill(job, prompt)
    story.engine.loaded("d")
    story.run()
    assert story.tokens("d") == expected_tokens(prompt, SamplingParams(**params))
    finish = story.finish("d")
    assert (finish.prompt_counts.tokens, finish.prompt_counts.covered) == (length, 1)  # the last is computed here
    assert np.array_equal(finish.prompt_counts.counts, counts_of(prompt, length - 1, length))
    assert story.model.forwarded == len(story.tokens("d"))
    assert story.pool.held == 0


def test_only_what_is_not_cached_is_loaded():
    prompt = PROMPTS[0]
    story = Story()
    story.submit("here", prompt, max_tokens=1)
    story.run()
    story.submit("d", [*prompt[:6], 6, 6, 6], load_tokens=9, max_tokens=2, ignore_eos=True)
    story.run()
    (job,) = story.jobs
    assert (job.first, len(job.blocks)) == (1, 2)
    story.fill(job, [*prompt[:6], 6, 6, 6])
    story.engine.loaded("d")
    story.run()
    assert story.finish("d").cached_tokens == 4


def test_a_failed_load_fails_its_request_and_nothing_else():
    story = Story()
    story.submit("bad", PROMPTS[0], load_tokens=9, max_tokens=2)
    story.submit("good", PROMPTS[0], max_tokens=2)
    story.run()
    story.engine.load_failed("bad", "the lease ran out")
    story.run()
    assert (story.finish("bad").reason, story.finish("bad").problem) == ("error", "the lease ran out")
    assert story.finish("good").reason in ("length", "stop")
    assert story.tokens("good") == expected_tokens(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2))
    assert story.pool.held == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_no_numbers_fails_and_nothing_else(temperature, monkeypatch):
    story, logits_after = Story(), toy_model.logits_after
    spoilt = tuple(PROMPTS[0])
    monkeypatch.setattr(
        toy_model,
        "logits_after",
        lambda prefix: np.full(VOCAB, np.nan) if prefix[: len(spoilt)] == spoilt else logits_after(prefix),
    )
    for name, prompt in (("bad", PROMPTS[0]), ("good", PROMPTS[1]), ("kept", PROMPTS[0])):
        keep = {"keep": True, "max_tokens": 1} if name == "kept" else {"max_tokens": 6}
        story.submit(name, prompt, temperature=temperature, seed=3, **keep)
    story.run()
    for name in ("bad", "kept"):
        assert story.tokens(name) == []
        assert (story.finish(name).reason, story.finish(name).kept) == ("error", None)
        assert "not finite" in story.finish(name).problem
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=6)
    assert story.tokens("good") == expected_tokens(PROMPTS[1], params)
    assert story.pool.held == 0
    assert story.engine.problem is None


def test_blocks_of_an_aborted_load_are_free_when_nothing_writes_to_them_any_more():
    story = Story()
    for name in ("a", "b"):
        story.submit(name, PROMPTS[0], load_tokens=9)
    story.run()
    story.engine.abort("a")
    story.engine.abort("b")
    story.run()
    assert (story.finish("a").reason, story.finish("b").reason) == ("abort", "abort")
    assert story.pool.held == 6
    story.engine.loaded("a")
    story.engine.load_failed("b", "gone")
    story.run()
    assert story.pool.held == 0
    story.submit("c", PROMPTS[0], max_tokens=1)  # what was or was not loaded is not found
    story.run()
    assert story.finish("c").cached_tokens == 0


# --- a thread of its own ----------------------------------------------------------------------------


def test_a_running_engine_serves_and_ends_what_is_left_when_closed():
    story = Story(lease_s=0.01)
    story.engine.start()
    story.submit("a", [1, 2], max_tokens=3, ignore_eos=True)
    wait_until(lambda: story.heard["a"] and story.heard["a"][-1].finish)
    story.submit("waits", [1, 2], load_tokens=2)
    wait_until(lambda: story.jobs)
    story.engine.close()
    assert story.finish("a").reason == "length"
    assert (story.finish("waits").reason, story.finish("waits").problem) == (
        "error",
        "the engine has stopped: it was closed",
    )
    with pytest.raises(EngineError, match="the engine has stopped: it was closed"):
        story.submit("b", [1])


def test_a_failing_step_ends_every_request_with_the_reason(caplog):
    story = Story()
    story.model.forward = lambda batch, kv: 1 / 0
    story.engine.start()
    story.submit("a", [1, 2])
    wait_until(lambda: story.heard["a"] and story.engine.problem)
    assert story.finish("a").problem == "the engine has stopped: a step failed: division by zero"
    assert "the engine stops: a step failed" in caplog.text
    story.engine.close()


def test_an_idle_engine_takes_blocks_back_when_their_lease_runs_out():
    from coterie.clock import SystemClock

    story = Story(lease_s=0.05)
    story.engine._clock = SystemClock()
    story.engine.start()
    story.submit("p", [1, 2], max_tokens=1, keep=True)
    wait_until(lambda: story.heard["p"])
    wait_until(lambda: story.pool.held == 0)
    story.engine.close()
