"""Random scripts of requests, aborts, loads, releases and waits: nothing is lost, and nothing is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from toy_model import PROMPTS, Story, counts_of, expected_tokens, params_of

from coterie import wire
from coterie.engines.embedded.sampling import SamplingParams


class Script:
    """Random requests, aborts, loads, releases and waits."""

    def __init__(self, seed, blocks):
        self.rng = np.random.default_rng(seed)
        limits = {"running": int(self.rng.integers(1, 9)), "step_tokens": int(self.rng.integers(9, 40))}
        self.story = Story(blocks, lease_s=5.0, max_model_len=60, **limits)
        self.params, self.prompts, self.aborted, self.failed = {}, {}, set(), set()

    def submit(self):
        number, kind = len(self.prompts), self.rng.random()
        stem = PROMPTS[int(self.rng.integers(len(PROMPTS)))]
        prompt = stem[: int(self.rng.integers(1, len(stem) + 1))] + self.rng.integers(0, 3, 2).tolist()
        fields = params_of(number, max_tokens=int(self.rng.integers(6, 16)))
        if kind < 0.3:
            fields |= {"load_tokens": len(prompt)}
        elif kind < 0.5:
            fields |= {"keep": True, "max_tokens": 1, "min_tokens": 0}
        name = f"s{number}"
        self.prompts[name], self.params[name] = prompt, fields
        self.story.submit(name, prompt, asked=wire.ASK_COUNTS, **fields)

    def abort(self):
        name = f"s{self.rng.integers(len(self.prompts))}"
        self.aborted.add(name)
        self.story.engine.abort(name)

    def end_load(self, number):
        job = self.story.jobs.pop(number)
        if self.rng.random() < 0.2:
            self.failed.add(job.request_id)
            self.story.engine.load_failed(job.request_id, "lost")
        else:
            self.story.fill(job, self.prompts[job.request_id])
            self.story.engine.loaded(job.request_id)

    def act(self):
        kind = self.rng.random()
        if kind < 0.25:
            self.submit()
        elif kind < 0.35 and self.prompts:
            self.abort()
        elif kind < 0.45 and self.story.jobs:
            self.end_load(int(self.rng.integers(len(self.story.jobs))))
        elif kind < 0.5 and self.prompts:
            self.story.engine.release_handoff(f"s{self.rng.integers(len(self.prompts))}")
        elif kind < 0.55:
            self.story.clock.advance(1.0)
        else:
            self.story.engine.step()
            self.story.pool.check()

    def wind_down(self):
        while self.story.engine.stats().kv_usage or self.story.engine.step():
            self.story.run()
            self.story.clock.advance(5.0)
            while self.story.jobs:
                self.end_load(0)

    def check(self):
        stats = self.story.engine.stats()
        assert (stats.waiting, stats.running, stats.loading, stats.kept, stats.kv_usage) == (0, 0, 0, 0, 0)
        assert sum(stats.finished.values()) == len(self.prompts)
        for name, prompt in self.prompts.items():
            self.check_one(name, prompt, self.story.finish(name))

    def check_one(self, name, prompt, finish):
        fields = {key: value for key, value in self.params[name].items() if key not in ("load_tokens", "keep")}
        tokens, expected = self.story.tokens(name), expected_tokens(prompt, SamplingParams(**fields))
        if finish.reason in ("abort", "error"):
            assert name in self.aborted | self.failed
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            truth = counts_of(prompt, 0, len(prompt))
            counts = finish.prompt_counts
            assert (counts.counts <= truth).all()
            assert counts.complete == np.array_equal(counts.counts, truth)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_and_nothing_is_wrong_in_a_random_script(seed):
    script = Script(seed, blocks=[18, 24, 60][seed % 3])
    for _ in range(300):
        script.act()
    script.wind_down()
    script.check()


def test_two_hundred_aborts_leave_no_block():
    script = Script(99, blocks=30)
    while len(script.aborted) < 200:
        script.submit()
        for _ in range(int(script.rng.integers(1, 6))):
            script.act()
        script.abort()
    script.wind_down()
    script.check()
    assert script.story.engine.stats().finished["abort"] > 50
