"""Simulated decode workers: a group of data-parallel ranks that step together, mostly of one rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coterie.core import Reading
from coterie.placement import Placement
from coterie.sim.experts import Batch, Experts
from coterie.sim.kernel import Kernel, Priority
from coterie.sim.kv import KvBlocks
from coterie.sim.placement import BusiestRank, contiguous
from coterie.sim.spec import ClusterSpec
from coterie.sim.workers import Machine, Task


@dataclass(slots=True)
class StepTotals:
    """Sums over a group's decode steps.

    Attributes:
        steps: their number.
        requests: sizes of their batches, over all ranks.
        active: (layer, expert) pairs that they activated.
        busiest: of these, in each layer those of the rank that has most.
        busy_s: seconds that they took.
        preemptions: requests that were taken out of the batch for want of KV blocks.
    """

    steps: int = 0
    requests: int = 0
    active: float = 0.0
    busiest: float = 0.0
    busy_s: float = 0.0
    preemptions: int = 0

    def add(self, requests: int, active: float, busiest: float, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.requests += requests
        self.active += active
        self.busiest += busiest
        self.busy_s += seconds


class DecodeGroup(Machine):
    """Decodes with continuous batching; data-parallel ranks of an expert-parallel group step together.

        step_s = max over ranks of StepTime(requests of the rank, busiest) + recomputation
        busiest = sum over layers of max over ranks of the active experts that the rank holds

    Attention is the rank's own; experts serve the requests of all ranks, and all wait for the slowest at each layer.
    Requests are padded to the next captured CUDA graph (`ClusterSpec.graph_sizes`); active experts are not, since the
    padding's choices are dropped.  Where one rank holds all experts, `busiest` is the number of active experts.

    A step gives each request of the batch one token.  One that was preempted joins with a prefill of its prompt and of
    the tokens that it had, which makes that step so much longer for all.

    Args:
        kernel: runs it.
        spec: times, and sizes of each rank.
        experts: which experts the requests use.
        placement: of experts on ranks; by default contiguous blocks.

    Attributes:
        ranks: the workers that take tasks.
        totals: sums over its steps.
    """

    def __init__(self, kernel: Kernel, spec: ClusterSpec, experts: Experts, placement: Placement | None = None) -> None:
        self.totals = StepTotals()
        self.ranks = tuple(DecodeRank(kernel, spec, self) for _ in range(spec.ranks))
        self._kernel = kernel
        self._spec = spec
        self._experts = experts
        placed = placement or contiguous(experts.geometry, spec.holders)
        self._busiest = BusiestRank(placed) if spec.holders > 1 else None
        self._padded = _padded(spec.graph_sizes, spec.batch_requests)
        self._awake = False
        super().__init__()

    def wake(self) -> None:
        """Let a step begin, unless one runs or will."""
        if not self._awake:
            self._awake = True
            self._kernel.after(0, Priority.START, self._start, self.life)

    def _held(self) -> list[Task]:
        return [task for rank in self.ranks for task in rank.held()]

    def _clear(self) -> None:
        self._batch = self._experts.batch()
        self._number = 0  # of the step that runs or comes next
        self._awake = False
        for rank in self.ranks:
            rank.clear(self._batch)

    def _start(self, life: int) -> None:
        if life != self.life:
            return
        anew = sum(rank.begin(self._number) for rank in self.ranks)
        requests = len(self._batch)
        if not requests:  # all that could run waits for room, which those whose KV is on its way hold
            self._awake = False
            return
        active = self._batch.step()
        busiest = active if self._busiest is None else self._busiest(self._batch.used())
        seconds = self._step_s(busiest, anew)
        self.totals.add(requests, active, busiest, seconds)
        self._kernel.after(seconds, Priority.END, self._end, life)

    def _step_s(self, busiest: float, anew: int) -> float:
        step_s = max(self._spec.step_time.step_s(self._padded[rank.running], busiest) for rank in self.ranks)
        return step_s + self._spec.prefill_time.seconds(anew) if anew else step_s

    def _end(self, life: int) -> None:
        if life != self.life:
            return
        done = [task for rank in self.ranks for task in rank.end(self._number)]
        self._number += 1
        self._awake = False
        if any(rank.runnable for rank in self.ranks):
            self.wake()
        for task in done:
            task.on_end(task, True)


def _padded(graph_sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """For each batch size up to `most`, that of the smallest graph that holds it; larger ones run without a graph."""
    places = (bisect_left(graph_sizes, size) for size in range(most + 1))
    return tuple(graph_sizes[place] if place < len(graph_sizes) and size else size for size, place in enumerate(places))


class DecodeRank:
    """One rank of a group: what waits there, its KV, and its part of the batch.

    A task first takes KV blocks for its prompt, waiting for room if need be; then it pulls the prompt's KV (however
    many do so at once), waits for a place in the batch in order of arrival, and joins when a step begins.

    At its j-th step it holds the blocks of `prompt + j` tokens.  Where the blocks do not suffice, the last that joined
    is preempted: it gives up its blocks and waits for room before all others.

    Invariant, after every call: blocks held by tasks + free blocks = all blocks.
    """

    def __init__(self, kernel: Kernel, spec: ClusterSpec, group: DecodeGroup) -> None:
        self._kernel = kernel
        self._spec = spec
        self._group = group

    # --- as a worker ---

    @property
    def up(self) -> bool:
        """See `Worker.up`."""
        return self._group.up

    @property
    def queued(self) -> int:
        """See `Worker.queued`."""
        return len(self._roomless) + len(self._pulling) + len(self._waiting)

    @property
    def running(self) -> int:
        """See `Worker.running`."""
        return len(self._joined_at)

    @property
    def reading(self) -> Reading:
        """What it says of itself: its KV usage, and how many wait for KV blocks or for a place in the batch."""
        places = self._spec.batch_requests - len(self._joined_at)
        return Reading(self._kv.usage, len(self._roomless) + max(len(self._waiting) - places, 0))

    def submit(self, task: Task) -> None:
        """See `Worker.submit`."""
        if not self._group.up:
            task.on_end(task, False)
            return
        self._roomless.append(task)
        self._place()

    def lose(self) -> None:
        """Lose the whole group: its experts are spread over all ranks."""
        self._group.lose()

    def revive(self) -> None:
        """Let the whole group come up, empty."""
        self._group.revive()

    # --- as a part of the group ---

    @property
    def runnable(self) -> bool:
        """Whether a step would have something to do here."""
        return bool(self._joined_at or self._waiting)

    def held(self) -> list[Task]:
        """All tasks here."""
        return [*self._joined_at, *self._waiting, *self._pulling, *self._roomless]

    def clear(self, batch: Batch) -> None:
        """Begin with nothing, and with the group's new batch."""
        spec = self._spec
        self._batch = batch
        self._kv = KvBlocks(spec.kv_tokens, spec.block_tokens)
        self._roomless: deque[Task] = deque()
        self._pulling: dict[Task, None] = {}
        self._waiting: deque[Task] = deque()
        self._joined_at: dict[Task, int] = {}  # number of their first step, in the order in which they joined
        self._fresh: list[Task] = []  # of these, those whose first step it is
        self._ending: dict[int, list[Task]] = {}  # by the number of their last step
        self._growing: list[dict[Task, None]] = [{} for _ in range(spec.block_tokens)]  # by number modulo block tokens

    def begin(self, number: int) -> int:
        """Make step `number` ready: blocks for those that are there, places for those that wait.

        Returns:
            Tokens to compute anew in this step.
        """
        growing = self._growing[number % self._spec.block_tokens]
        while not self._kv.take(len(growing)):
            self._preempt(number)
        self._place()
        anew = 0
        while self._waiting and len(self._joined_at) < self._spec.batch_requests:
            task = self._waiting.popleft()
            self._join(task, number)
            anew += task.prompt_tokens + task.given if task.given else 0
        return anew

    def end(self, number: int) -> list[Task]:
        """Give each a token.  Only those that begin or end with it are looked at.

        Returns:
            Those that have all their tokens.
        """
        for task in self._fresh:
            if task.first_token_s is None:
                task.first_token_s = self._kernel.now()
        self._fresh.clear()
        done = self._ending.pop(number, [])
        for task in done:
            self._leave(task, number + 1)
        if self._roomless:
            self._place()
        return done

    def _place(self) -> None:
        """Give room to those that wait for it, in their order."""
        while self._roomless and self._kv.take(self._blocks(self._roomless[0], 1)):
            task = self._roomless.popleft()
            if task.given:  # its prompt is computed anew here, not pulled again
                self._waiting.append(task)
                continue
            self._pulling[task] = None
            handoff_s = self._spec.handoff_time.seconds(task.prompt_tokens)
            self._kernel.after(handoff_s, Priority.HANDOFF, self._pulled, task, self._group.life)

    def _pulled(self, task: Task, life: int) -> None:
        if life != self._group.life:
            return
        del self._pulling[task]
        self._waiting.append(task)
        self._group.wake()

    def _join(self, task: Task, number: int) -> None:
        self._batch.join(task, task.position, task.given)
        self._joined_at[task] = number
        self._fresh.append(task)
        self._ending.setdefault(number + task.output_tokens - task.given - 1, []).append(task)
        self._growing_with(task, number)[task] = None

    def _leave(self, task: Task, number: int) -> None:
        """Out of the batch before step `number`; its blocks are free."""
        joined = self._joined_at.pop(task)
        self._batch.leave(task)
        del self._growing_with(task, joined)[task]
        self._kv.give(self._blocks(task, number - joined))

    def _preempt(self, number: int) -> None:
        task, joined = next(reversed(self._joined_at.items()))
        self._leave(task, number)
        last = joined + task.output_tokens - task.given - 1
        self._ending[last].remove(task)
        task.given += number - joined
        self._roomless.appendleft(task)
        self._group.totals.preemptions += 1

    def _blocks(self, task: Task, steps: int) -> int:
        """Blocks that it holds in its `steps`-th step since it joined."""
        return self._kv.blocks_of(task.prompt_tokens + task.given + steps)

    def _growing_with(self, task: Task, joined: int) -> dict[Task, None]:
        """Those that need another block at the same steps: whose tokens fill their blocks just then."""
        return self._growing[(joined - task.prompt_tokens - task.given) % self._spec.block_tokens]
