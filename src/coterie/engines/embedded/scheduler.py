"""What each step computes: continuous batching over paged blocks, with chunked prefill.

A step takes, in this order and up to its token budget:

1. every running request that needs one token: decoding never waits for a prefill;
2. more of the prompts that are running, the earliest first;
3. waiting requests, the earliest first, as long as blocks for all their tokens are there.

Blocks for a whole prompt are taken at admission, so only decoding runs out of them; then the youngest running request
goes back to wait and is computed again, up to what is still cached.  The oldest running request never loses its blocks
to another, so it ends; a request that cannot get its blocks holds back all that came later.  Hence nobody starves.

A waiting request whose next block is being computed by a running one waits for it instead of computing it twice.  That
is how the outputs of one prompt (`n`) share its blocks.

Pure: no threads, no clock, no chance.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from coterie.engines.embedded.blocks import BlockHash, BlockPool, block_hash
from coterie.engines.embedded.request import LoadJob, Request
from coterie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once.

    Attributes:
        running: most requests that run or load.
        step_tokens: most tokens of a step; at least `running`, so that a prefill always moves on.
        prefix_caching: whether blocks are found by what they hold.

    Raises:
        ConfigError: a value is out of range.
    """

    running: int = 64
    step_tokens: int = 512
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.running < 1:
            raise ConfigError(f"engine: at most {self.running} running requests; it must be at least 1")
        if self.step_tokens < self.running:
            raise ConfigError(
                f"engine: {self.step_tokens} tokens a step for {self.running} running requests; raise the tokens or "
                "lower the requests, for each may need one token in a step"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Part of a step: `length` tokens of a request from `start` on."""

    request: Request
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the next token can be sampled after it."""
        return self.start + self.length == len(self.request.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one step does.

    Attributes:
        work: tokens to compute; empty where there is nothing to do.
        fresh: blocks given out for new content since the last step.
        loads: blocks to fill from outside.
    """

    work: tuple[Work, ...]
    fresh: tuple[int, ...]
    loads: tuple[LoadJob, ...]


@dataclass(slots=True)
class Tally:
    """What has happened so far.

    Attributes:
        preemptions: requests that lost their blocks.
        prefix_queries: tokens that were looked up in the cache.
        prefix_hits: tokens of these that were found.
        fetched: tokens whose keys and values another engine was asked for.
    """

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    fetched: int = 0


class Scheduler:
    """Owns the blocks and the order of requests.

    Args:
        pool: the blocks.
        limits: how much runs at once.
    """

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.tally = Tally()
        self._limits = limits
        self._waiting: list[Request] = []  # by arrival
        self._running: list[Request] = []  # by arrival
        self._loading: dict[str, Request] = {}
        self._computing: set[BlockHash] = set()  # of full blocks that running requests are about to fill
        self._fresh: list[int] = []
        self._loads: list[LoadJob] = []

    @property
    def waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return len(self._running)

    @property
    def loading(self) -> int:
        """Requests whose blocks are being filled from outside."""
        return len(self._loading)

    # --- requests come and go -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A new request, which the caller knows to fit the pool when it is alone."""
        bisect.insort(self._waiting, request, key=_arrival)

    def remove(self, request: Request, *, keep_blocks: bool = False) -> None:
        """A waiting or running request ended; for one that is loading, `unload` comes when its load has ended."""
        assert request.id not in self._loading, "something outside writes to its blocks"
        if not request.blocks:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        self._computing.difference_update(request.hashes[request.published :])
        if not keep_blocks:
            self._release(request)

    def is_loading(self, request: Request) -> bool:
        """Whether something outside writes to its blocks."""
        return request.id in self._loading

    def loaded(self, request: Request) -> None:
        """The blocks of its `LoadJob` are filled."""
        del self._loading[request.id]
        # The last token of all is computed here in any case: what follows is sampled after it.
        request.computed = max(request.computed, min(request.load_tokens, len(request.tokens) - 1))
        request.load_tokens = 0
        self._run(request)
        self._publish(request)

    def unload(self, request: Request) -> None:
        """The load of a request that has ended, or ends by its failure, is over: nothing writes to its blocks now."""
        del self._loading[request.id]
        self._release(request)

    # --- a step -------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """The next step; tell `done` when it was computed, before the next is planned, or it is planned again."""
        work = [Work(request, request.computed, 1) for request in self._decoding()]
        budget = self._limits.step_tokens - len(work)
        prompts = itertools.chain([request for request in self._running if request.left > 1], self._admitted())
        while budget and (request := next(prompts, None)):
            length = min(request.left, budget)
            work.append(Work(request, request.computed, length))
            budget -= length
        fresh, self._fresh = tuple(self._fresh), []
        loads, self._loads = tuple(self._loads), []
        return Step(tuple(work), fresh, loads)

    def done(self, step: Step) -> None:
        """The keys and values of a step are written."""
        for work in step.work:
            work.request.computed = work.start + work.length
            self._publish(work.request)

    def _decoding(self) -> Iterator[Request]:
        """Running requests that need one token, each with a block for it."""
        for request in self._running.copy():
            if request.blocks and request.left == 1 and self._grow(request):
                yield request

    def _grow(self, request: Request) -> bool:
        """A block for the next token; False if the request lost its own instead, being the youngest."""
        while request.computed == len(request.blocks) * self.pool.block_size:
            if (new := self.pool.allocate(1)) is not None:
                request.blocks += new
                self._fresh += new
            else:
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return False
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        self.add(request)
        self.tally.preemptions += 1

    # --- admission ----------------------------------------------------------------------------------

    def _admitted(self) -> Iterator[Request]:
        """Waiting requests that can be computed now; those whose keys and values are elsewhere start to load."""
        for request in self._waiting.copy():
            if self.running + self.loading == self._limits.running:
                return
            if request.awaited in self._computing:
                continue
            found = self._find(request)
            if request.awaited is not None:
                continue
            if not self._take_blocks(request, found):
                return
            self._waiting.remove(request)
            if request.load_tokens:
                self._load(request)
            else:
                self._run(request)
                yield request

    def _find(self, request: Request) -> list[int]:
        """Blocks of its first tokens, all but the last; sets `awaited` if a running request computes the next."""
        names = self._hashes(request, (len(request.tokens) - 1) // self.pool.block_size)
        found = self.pool.find(names)
        following = names[len(found)] if len(found) < len(names) else None
        request.awaited = following if following in self._computing and not request.load_tokens else None
        return found

    def _take_blocks(self, request: Request, found: list[int]) -> bool:
        """Hold the blocks found, and new ones for its other tokens; False, and nothing done, where there are too few.

        One block for each running request is left: to admit a request only to preempt it at once would waste both.
        """
        new = self.pool.blocks_for(len(request.tokens)) - len(found)
        if new + self.pool.unheld(found) + self.running > self.pool.available:
            return False
        self.pool.hold(found)
        fresh = self.pool.allocate(new)
        assert fresh is not None, "they were counted"
        request.blocks = found + fresh
        request.published = len(found)
        request.computed = len(found) * self.pool.block_size
        self._fresh += fresh
        self._count(request)
        return True

    def _count(self, request: Request) -> None:
        if request.cached_tokens is None:  # not again after a preemption: what it finds then is its own
            request.cached_tokens = request.computed
            self.tally.prefix_queries += len(request.tokens)
            self.tally.prefix_hits += request.computed

    def _load(self, request: Request) -> None:
        first = request.published
        self.tally.fetched += request.load_tokens - request.computed
        blocks = request.blocks[first : self.pool.blocks_for(request.load_tokens)]
        self._loading[request.id] = request
        self._loads.append(LoadJob(request.id, first, tuple(blocks)))

    def _run(self, request: Request) -> None:
        bisect.insort(self._running, request, key=_arrival)
        self._computing.update(self._hashes(request, len(request.tokens) // self.pool.block_size)[request.published :])

    # --- blocks -------------------------------------------------------------------------------------

    def _hashes(self, request: Request, count: int) -> list[BlockHash]:
        """Hashes of its first `count` blocks, which are full; none where nothing is found by hash."""
        if not self._limits.prefix_caching:
            return []
        size, names = self.pool.block_size, request.hashes
        for start in range(len(names) * size, count * size, size):
            names.append(block_hash(names[-1] if names else b"", request.tokens[start : start + size]))
        return names[:count]

    def _publish(self, request: Request) -> None:
        full = request.computed // self.pool.block_size
        if full == request.published:
            return
        for number, name in enumerate(self._hashes(request, full)[request.published :], request.published):
            self.pool.publish(request.blocks[number], name)
            self._computing.discard(name)
        request.published = full

    def _release(self, request: Request) -> None:
        self._computing.difference_update(request.hashes[request.published :])
        self.pool.release(request.blocks)
        request.blocks, request.published, request.computed = [], 0, 0


def _arrival(request: Request) -> int:
    return request.arrival
