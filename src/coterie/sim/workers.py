"""Simulated engines: what all have in common, and prefill workers.  None knows who sends it requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from coterie.latency import TokenTime
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
        given: tokens that were decoded before it was last taken out of the batch.
    """

    position: int
    prompt: str
    prompt_tokens: int
    output_tokens: int
    on_end: Callable[[Task, bool], None]
    first_token_s: float | None = None
    given: int = 0


class Worker(Protocol):
    """What a cluster needs of a worker of either role."""

    @property
    def up(self) -> bool:
        """Whether it takes tasks."""
        ...

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


class Machine(ABC):
    """What workers of both roles share: being lost with all tasks, and coming back.

    Attributes:
        up: whether it takes tasks.
        life: how often it was lost; what a former life began is void.
    """

    def __init__(self) -> None:
        self.up = True
        self.life = 0
        self._clear()

    def lose(self) -> None:
        """See `Worker.lose`."""
        tasks = self._held()
        self.up = False
        self.life += 1
        self._clear()
        for task in tasks:
            task.on_end(task, False)

    def revive(self) -> None:
        """See `Worker.revive`."""
        self.up = True

    @abstractmethod
    def _held(self) -> list[Task]: ...

    @abstractmethod
    def _clear(self) -> None: ...


class PrefillWorker(Machine):
    """Computes prompts: each step takes as many waiting ones as its token budget allows, at least one, in order.

        step_s = time(sum of tokens that are not cached)

    All prompts of a step are done at its end.
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

    def submit(self, task: Task) -> None:
        """See `Worker.submit`."""
        if not self.up:
            task.on_end(task, False)
            return
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
            self._kernel.after(0, Priority.START, self._start, self.life)

    def _start(self, life: int) -> None:
        if life != self.life:
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
        if life != self.life:
            return
        done, self._step = self._step, []
        self._awake = False
        for task in done:
            self._cache.store(task.prompt, task.prompt_tokens)
        if self._waiting:
            self._wake()
        for task in done:
            task.on_end(task, True)
