"""A small paged-KV scheduler that does at random what vLLM does: hits, eviction, preemption, abort, outside fills.

It drives a `CountsPlan` as vLLM's scheduler does and keeps the truth beside it: for each block, which
tokens were really forwarded into it since it was given out.  With `lag`, a step is planned while the one
before is in flight, as in vLLM's asynchronous scheduling: the output of a step is seen one plan later, and a
request may be planned once more after its last step.  Which experts a token chooses depends on
all tokens before it, so that requests with a common prefix agree on the prefix and on nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from coterie.core import ModelGeometry
from coterie.vllm_plugin.plan import CountsPlan, StepPlan
from coterie.vllm_plugin.slots import Layout, Slots

GEOMETRY = ModelGeometry(layers=2, experts=6, top_k=2)
BLOCK = 4


def experts_of(prefix: tuple[int, ...]) -> np.ndarray:
    """`[L, k]` experts of the last token of `prefix`."""
    digest = hashlib.blake2b(repr(prefix).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    return np.stack([rng.permutation(GEOMETRY.experts)[: GEOMETRY.top_k] for _ in range(GEOMETRY.layers)])


def add_token(counts: np.ndarray, prefix: tuple[int, ...]) -> None:
    for layer, ids in enumerate(experts_of(prefix)):
        counts[layer, ids] += 1


@dataclass
class Request:
    name: str
    tokens: list[int]
    prompt: int
    limit: int
    params: dict
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    prompt_truth: tuple[int, np.ndarray] | None = None
    total_truth: tuple[int, np.ndarray] | None = None
    readmitted: bool = False
    finished: bool = False

    @property
    def last(self) -> int:
        """Tokens forwarded when the last output token is sampled."""
        return self.prompt + self.limit - 1


class Rows:
    """The worker's rows in plain numpy: restart, add, sum."""

    def __init__(self, blocks: int) -> None:
        self.rows = np.zeros((blocks, GEOMETRY.layers, GEOMETRY.experts), np.int64)

    def run(self, plan: StepPlan, slots: Slots, written: list[tuple[int, tuple[int, ...]]]) -> None:
        self.rows[plan.restart] = 0
        for slot, prefix in written:
            add_token(self.rows[slot // BLOCK], prefix)
        if plan.ids is not None:
            ids = {slot: experts_of(prefix) for slot, prefix in written}
            slots.write_ids(plan.ids.page, plan.ids.ticket, np.stack([ids[slot] for slot in plan.ids.kv_slots]))
        for job in plan.jobs:
            total = self.rows[job.blocks].sum(0)
            slots.write(job.slot, job.part, job.ticket, int(total[0].sum()) // GEOMETRY.top_k, total.astype(np.int32))


class ToyEngine:
    def __init__(self, seed: int, blocks: int = 14, slots: int = 8, outside: bool = True, lag: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        layout = Layout(slots, GEOMETRY, page_tokens=blocks * BLOCK)
        self.plan = CountsPlan(layout, BLOCK)
        self.worker_slots = Slots.open(str(self.plan._path), layout)
        self.worker_slots.announce(GEOMETRY.layers)
        self.plan.close()  # as its first step would: some tests take none
        self.rows = Rows(blocks)
        self.truth: list[dict[int, tuple[int, ...]]] = [{} for _ in range(blocks)]
        self.content: list[tuple[int, ...] | None] = [None] * blocks  # prefix that a full block completes
        self.users = [0] * blocks
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.answers: dict[str, tuple[Request, dict | None]] = {}
        self.outside = outside
        self.in_flight: list[tuple[StepPlan, list[tuple[int, tuple[int, ...]]], list[tuple[Request, int]]]] = []
        self.lag = lag
        names = ("hit", "evicted", "preempted", "aborted", "outside", "chunked", "recomputed", "one_more")
        self.events = dict.fromkeys(names, 0)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)
        self.plan.request_added(request.name, request.prompt, request.params)

    # --- blocks ---

    def take_block(self) -> int | None:
        free = [b for b, users in enumerate(self.users) if users == 0]
        if not free:
            return None
        empty = [b for b in free if self.content[b] is None]
        block = int(self.rng.choice(empty or free))
        self.events["evicted"] += self.content[block] is not None
        self.content[block], self.users[block], self.truth[block] = None, 1, {}
        return block

    def grow(self, request: Request, tokens: int) -> bool:
        while len(request.blocks) * BLOCK < tokens:
            block = self.take_block()
            if block is None:
                return False
            request.blocks.append(block)
        return True

    def release(self, request: Request) -> None:
        for block in request.blocks:
            self.users[block] -= 1
        request.blocks, request.computed = [], 0

    def hit(self, request: Request) -> list[int]:
        found = []
        for end in range(BLOCK, len(request.tokens), BLOCK):  # at least one token is always computed
            prefix = tuple(request.tokens[:end])
            block = next((b for b, content in enumerate(self.content) if content == prefix), None)
            if block is None:
                break
            found.append(block)
        return found

    # --- one step ---

    def admit(self, request: Request) -> bool:
        hits = self.hit(request)
        self.plan.prefix_looked_up(request.name, len(hits) * BLOCK)
        for block in hits:
            self.users[block] += 1
        request.blocks, request.computed = hits, len(hits) * BLOCK
        loaded = 0
        if self.outside and self.rng.random() < 0.3:  # KV of further tokens comes from outside
            loaded = int(self.rng.integers(0, len(request.tokens) - request.computed))
        if not self.grow(request, request.computed + loaded + 1):
            self.release(request)
            return False
        self.events["hit"] += bool(hits)
        self.events["outside"] += bool(loaded)
        self.plan.blocks_given(request.name, request.blocks)
        request.computed += loaded
        if loaded and self.rng.random() < 0.5:  # vLLM tells of an asynchronous load's blocks a second time
            self.plan.blocks_given(request.name, request.blocks)
        self.cache_full_blocks(request)
        request.readmitted = request.prompt_truth is not None
        return True

    def step(self) -> None:
        for request in list(self.running):
            if self.rng.random() < 0.06:
                self.preempt(request)
        for request in list(self.waiting):
            if self.rng.random() < 0.5 and self.admit(request):
                self.waiting.remove(request)
                self.running.append(request)
        scheduled: dict[str, tuple[int, int]] = {}
        for request in list(self.running):
            if request not in self.running or self.rng.random() < 0.2:
                continue
            left = len(request.tokens) - request.computed
            tokens = int(self.rng.integers(1, left + 1)) if left > 1 else left
            self.events["chunked"] += tokens < left
            if self.grow(request, request.computed + tokens):
                scheduled[request.name] = (request.computed, tokens)
            else:
                self.preempt(request)
        by_name = {request.name: request for request in self.running}
        plan = self.plan.step(scheduled, lambda name: by_name[name].blocks)
        written: list[tuple[int, tuple[int, ...]]] = []
        for name, (start, tokens) in scheduled.items():
            request = by_name[name]
            self.events["recomputed"] += start + tokens > request.prompt and tokens > 1
            self.events["one_more"] += start + tokens > request.last
            for position in range(start, start + tokens):
                block, prefix = request.blocks[position // BLOCK], tuple(request.tokens[: position + 1])
                self.truth[block][position % BLOCK] = prefix
                written.append((block * BLOCK + position % BLOCK, prefix))
        self.rng.shuffle(written)
        ends = [(by_name[name], start + tokens) for name, (start, tokens) in scheduled.items()]
        for request, end in ends:
            self.advance(request, end)
        self.in_flight.append((plan, written, ends))
        while len(self.in_flight) > self.lag:
            self.settle(*self.in_flight.pop(0))

    def advance(self, request: Request, end: int) -> None:
        """The step is planned; its token is sampled, but not seen yet."""
        request.computed = end
        self.cache_full_blocks(request)
        if end == request.prompt and request.prompt_truth is None:
            request.prompt_truth = self.covered(request, end)
        if end == request.last:
            request.total_truth = self.covered(request, end)
        if end == len(request.tokens):
            request.tokens.append(int(self.rng.integers(0, 3)))

    def settle(
        self, plan: StepPlan, written: list[tuple[int, tuple[int, ...]]], ends: list[tuple[Request, int]]
    ) -> None:
        """The worker runs a step, and the scheduler sees its output."""
        self.rows.run(plan, self.worker_slots, written)
        for request, end in ends:
            if request.name in self.answers:
                continue
            if self.rng.random() < 0.05:
                self.events["aborted"] += 1
                self.finish(request)
            elif end == request.last:
                request.finished = True
                self.finish(request)

    def cache_full_blocks(self, request: Request) -> None:
        for index in range(request.computed // BLOCK):
            self.content[request.blocks[index]] = tuple(request.tokens[: (index + 1) * BLOCK])

    def preempt(self, request: Request) -> None:
        self.events["preempted"] += 1
        self.running.remove(request)
        self.release(request)
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        reply = self.plan.request_finished(request.name, request.last + 1 if request.finished else len(request.tokens))
        self.answers[request.name] = (request, reply if request.finished else None)
        (self.running if request in self.running else self.waiting).remove(request)
        self.release(request)

    def covered(self, request: Request, end: int) -> tuple[int, np.ndarray]:
        counts = np.zeros((GEOMETRY.layers, GEOMETRY.experts), np.int64)
        covered = 0
        for position in range(end):
            prefix = self.truth[request.blocks[position // BLOCK]].get(position % BLOCK)
            if prefix is not None:
                assert prefix == tuple(request.tokens[: position + 1]), "the toy itself is wrong"
                covered += 1
                add_token(counts, prefix)
        return covered, counts
