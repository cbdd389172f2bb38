"""Simulated engines: a prefill worker and a decode worker.  Neither knows who sends it requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coterie.latency import StepTime, TokenTime
from coterie.sim.experts import Experts
from coterie.sim.kernel import Kernel, Priority


@dataclass(slots=True, eq=False)
class Task:
    """One request's part at one worker.

    Attributes:
        position: which of the population it is.
        prompt: identity of its prompt.
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens to decode.
        on_end: called once, with the task and whether it was done; if not, the worker was lost.
        first_token_s: when its first token was decoded.
    """

    position: int
    prompt: str
    prompt_tokens: int
    output_tokens: int
    on_end: Callable[[Task, bool], None]
    first_token_s: float | None = None


class Worker(Protocol):
    """What a cluster needs of a worker of either role.

    Attributes:
        up: whether it takes tasks.
    """

    up: bool

    @property
    def queued(self) -> int:
        """Tasks that wait."""
        ...

    @property
    def running(self) -> int:
        """Tasks that are worked on."""
        ...

    def submit(self, task: Task) -> None:
        """Take a task; one that is down refuses it at once."""
        ...

    def lose(self) -> None:
        """Go down: every task here ends undone."""
        ...

    def revive(self) -> None:
        """Come up, empty."""
        ...


class PrefixCache:
    """Whole prompts whose KV is still there, the least recently used leaving first.

    A prompt that is seen again costs only its last block: engines keep whole blocks and compute one token or more anew.

    Args:
        capacity_tokens: how many tokens' KV it holds.
        block_tokens: tokens of a block.
    """

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._block = block_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._used = 0

    def cached(self, prompt: str, tokens: int) -> int:
        """Tokens of a prompt that need not be computed."""
        return (tokens - 1) // self._block * self._block if prompt in self._tokens else 0

    def store(self, prompt: str, tokens: int) -> None:
        """A prompt's KV was computed or used."""
        self._used += tokens - self._tokens.pop(prompt, 0)
        self._tokens[prompt] = tokens
        while self._used > self._capacity:
            _, gone = self._tokens.popitem(last=False)
            self._used -= gone


class _Machine(ABC):
    """What workers of both roles share: taking tasks, being lost with all of them, and coming back."""

    def __init__(self) -> None:
        self.up = True
        self._life = 0
        self._clear()

    def submit(self, task: Task) -> None:
        """See `Worker.submit`."""
        if not self.up:
            task.on_end(task, False)
            return
        self._take(task)

    def lose(self) -> None:
        """See `Worker.lose`."""
        tasks = self._held()
        self.up = False
        self._life += 1
        self._clear()
        for task in tasks:
            task.on_end(task, False)

    def revive(self) -> None:
        """See `Worker.revive`."""
        self.up = True

    @abstractmethod
    def _take(self, task: Task) -> None: ...

    @abstractmethod
    def _held(self) -> list[Task]: ...

    @abstractmethod
    def _clear(self) -> None: ...


class PrefillWorker(_Machine):
    """Computes prompts: each step takes as many waiting ones as its token budget allows, at least one, in order.

        step_s = time(sum of tokens that are not cached)

    All prompts of a step are done at its end.

    Attributes:
        up: whether it takes tasks.
    """

    def __init__(self, kernel: Kernel, time: TokenTime, budget_tokens: int, cache: Callable[[], PrefixCache]) -> None:
        self._kernel = kernel
        self._time = time
        self._budget = budget_tokens
        self._new_cache = cache
        super().__init__()

    @property
    def queued(self) -> int:
        """See `Worker.queued`."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """See `Worker.running`."""
        return len(self._step)

    def _take(self, task: Task) -> None:
        self._waiting.append(task)
        self._wake()

    def _held(self) -> list[Task]:
        return [*self._step, *self._waiting]

    def _clear(self) -> None:
        self._waiting: deque[Task] = deque()
        self._step: list[Task] = []
        self._cache = self._new_cache()
        self._awake = False

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._kernel.after(0, Priority.START, self._start, self._life)

    def _start(self, life: int) -> None:
        if life != self._life:
            return
        tokens = 0
        while self._waiting:
            task = self._waiting[0]
            computed = task.prompt_tokens - self._cache.cached(task.prompt, task.prompt_tokens)
            if self._step and tokens + computed > self._budget:
                break
            tokens += computed
            self._step.append(self._waiting.popleft())
        self._kernel.after(self._time.seconds(tokens), Priority.END, self._end, life)

    def _end(self, life: int) -> None:
        if life != self._life:
            return
        done, self._step = self._step, []
        self._awake = False
        for task in done:
            self._cache.store(task.prompt, task.prompt_tokens)
        if self._waiting:
            self._wake()
        for task in done:
            task.on_end(task, True)


@dataclass(slots=True)
class StepTotals:
    """Sums over a worker's decode steps.

    Attributes:
        steps: their number.
        requests: sizes of their batches.
        active: (layer, expert) pairs that they activated.
        busy_s: seconds that they took.
    """

    steps: int = 0
    requests: int = 0
    active: float = 0.0
    busy_s: float = 0.0

    def add(self, requests: int, active: float, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.requests += requests
        self.active += active
        self.busy_s += seconds


class DecodeWorker(_Machine):
    """Decodes with continuous batching.

    A task first pulls its prompt's KV (`handoff`, however many do so at once), then waits for a place in the batch, in
    order of arrival; a step begins with all that fit, and gives each one token.

    Attributes:
        up: whether it takes tasks.
        totals: sums over its steps.
    """

    def __init__(self, kernel: Kernel, time: StepTime, handoff: TokenTime, most: int, experts: Experts) -> None:
        self.totals = StepTotals()
        self._kernel = kernel
        self._time = time
        self._handoff = handoff
        self._most = most
        self._experts = experts
        super().__init__()

    @property
    def queued(self) -> int:
        """See `Worker.queued`."""
        return len(self._pulling) + len(self._waiting)

    @property
    def running(self) -> int:
        """See `Worker.running`."""
        return len(self._batch)

    def _take(self, task: Task) -> None:
        self._pulling[task] = None
        self._kernel.after(self._handoff.seconds(task.prompt_tokens), Priority.HANDOFF, self._pulled, task, self._life)

    def _held(self) -> list[Task]:
        running = [task for tasks in self._ending.values() for task in tasks]
        return [*running, *self._waiting, *self._pulling]

    def _clear(self) -> None:
        self._pulling: dict[Task, None] = {}
        self._waiting: deque[Task] = deque()
        self._batch = self._experts.batch()
        self._joined: list[Task] = []
        self._ending: dict[int, list[Task]] = {}  # by the number of their last step
        self._number = 0  # of the step that runs or comes next
        self._awake = False

    def _pulled(self, task: Task, life: int) -> None:
        if life != self._life:
            return
        del self._pulling[task]
        self._waiting.append(task)
        if not self._awake:
            self._awake = True
            self._kernel.after(0, Priority.START, self._start, life)

    def _start(self, life: int) -> None:
        if life != self._life:
            return
        while self._waiting and len(self._batch) < self._most:
            task = self._waiting.popleft()
            self._batch.join(task, task.position)
            self._joined.append(task)
            self._ending.setdefault(self._number + task.output_tokens - 1, []).append(task)
        active = self._batch.step()
        seconds = self._time.step_s(len(self._batch), active)
        self.totals.add(len(self._batch), active, seconds)
        self._kernel.after(seconds, Priority.END, self._end, life)

    def _end(self, life: int) -> None:
        """Give everyone a token.  Only those that begin or end with it are looked at."""
        if life != self._life:
            return
        for task in self._joined:
            task.first_token_s = self._kernel.now()
        self._joined.clear()
        done = self._ending.pop(self._number, [])
        self._number += 1
        for task in done:
            self._batch.leave(task)
        self._awake = bool(self._batch or self._waiting)
        if self._awake:
            self._kernel.after(0, Priority.START, self._start, life)
        for task in done:
            task.on_end(task, True)
