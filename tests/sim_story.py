"""Simulated workers by themselves, and what becomes of the tasks that they are given."""

import numpy as np
import pytest

from coterie.core import ModelGeometry
from coterie.latency import StepTime, TokenTime
from coterie.sim.decode import DecodeGroup
from coterie.sim.experts import ExpectedExperts
from coterie.sim.kernel import Kernel, Priority
from coterie.sim.spec import ClusterSpec
from coterie.sim.workers import PrefillWorker, PrefixCache, Task

# Two requests, one layer of four experts: the first uses expert 0 half of the time, the second expert 1 always.
EXPERTS = ExpectedExperts(np.array([[[0.5, 0, 0, 0]], [[0, 1.0, 0, 0]]]), ModelGeometry(layers=1, experts=4, top_k=1))

AT_ONCE = TokenTime(0.0, 0.0)
PREFILL = TokenTime(0.5, 0.001)
DECODE = StepTime(1.0, 0.1, 0.2)


class Story:
    """A kernel, and what became of the tasks: (name, time, whether it was done)."""

    def __init__(self):
        self.kernel = Kernel()
        self.log = []

    def task(self, name, *, position=0, prompt_tokens=100, output_tokens=1):
        return Task(position, name, prompt_tokens, output_tokens, lambda task, done: self.end(name, done))

    def end(self, name, done):
        self.log.append((name, pytest.approx(self.kernel.now()), done))

    def submit(self, worker, time_s, task):
        self.kernel.at(time_s, Priority.ARRIVAL, worker.submit, task)

    def prefill(self, *, budget_tokens=1000, cache_tokens=0):
        return PrefillWorker(self.kernel, PREFILL, budget_tokens, lambda: PrefixCache(cache_tokens, 16))

    def group(self, *, time=DECODE, handoff=AT_ONCE, most=8, experts=EXPERTS, placement=None, **sizes):
        """A decode group; with recomputation of 0.5 s and 1 ms a token, as prefill."""
        spec = ClusterSpec(
            1, 1, step_time=time, handoff_time=handoff, prefill_time=PREFILL, batch_requests=most, **sizes
        )
        return DecodeGroup(self.kernel, spec, experts, placement)

    def decode(self, **options):
        return self.group(**options).ranks[0]
