"""The engine: requests in, news of them out, one step after the other in one thread.

    submit, abort, loaded ──> orders ──> [ take orders, plan, compute, sample, tell ] ──> sink
    any thread                           the engine's thread                              in the engine's thread

What other threads want waits until the step at hand is done; so nothing but the queue of orders, the table of live
requests and the leases is shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from coterie.clock import Clock, SystemClock
from coterie.engines.embedded.blocks import BlockPool
from coterie.engines.embedded.forward import Computed, Runner, StepError, StepModel
from coterie.engines.embedded.kept import KeptTable
from coterie.engines.embedded.live import Live, Sink, TextSource
from coterie.engines.embedded.request import (
    Finish,
    FinishReason,
    KeptBlocks,
    LoadJob,
    Request,
    Submission,
    TokenOutput,
)
from coterie.engines.embedded.sampling import Floats, sample
from coterie.engines.embedded.scheduler import Limits, Scheduler, Step
from coterie.engines.embedded.stats import Stats, StepTotals, Totals
from coterie.errors import ConfigError, EngineError, RequestError
from coterie.latency import StepPoint

LONGEST_WAIT_S = 86_400.0
"""A day: neither a lease nor the fetching of KV may last longer."""
log = logging.getLogger("coterie.engine")
_NO_LOGITS = "the model's logits are not finite: its weights, or KV that was fetched, are damaged"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        blocks: KV blocks.
        block_size: tokens of each.
        max_model_len: most tokens of prompt and output together.
        lease_s: seconds for which the blocks of a finished prompt wait for another engine (vLLM's default).
        limits: how much runs at once.

    Raises:
        ConfigError: a value is out of range.
    """

    blocks: int
    block_size: int
    max_model_len: int
    lease_s: float = 30.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(f"engine: max_model_len is {self.max_model_len}; a prompt and its output need at least 2")
        if not 0 < self.lease_s <= LONGEST_WAIT_S:
            raise ConfigError(f"engine: lease_s is {self.lease_s}; it must be positive and at most {LONGEST_WAIT_S}")


def _nothing() -> None:
    pass


class Engine:
    """Serves requests with one model.

    `step` is the whole of it, for tests and for a loop of one's own; `start` runs it in a thread until `close`.

    Args:
        model: the model.
        text: its tokenizer.
        kv: its cache, of `config.blocks` blocks.
        config: sizes.
        rng: for seeds of requests that name none.
        clock: for leases.
        on_load: hears in the engine's thread of blocks to fill from outside; it must not block, and `loaded` or
            `load_failed` must be called for each.
        after_step: called in the engine's thread after the sinks of a step were.
        on_decode: told in the engine's thread of each step that computed one token of each of its requests, with the
            time by the clock; it must not block for long.
    """

    def __init__(
        self,
        model: StepModel,
        text: TextSource,
        kv: Floats,
        config: EngineConfig,
        *,
        rng: np.random.Generator,
        clock: Clock | None = None,
        on_load: Callable[[LoadJob], None] | None = None,
        after_step: Callable[[], None] = _nothing,
        on_decode: Callable[[StepPoint], None] | None = None,
    ) -> None:
        self.config = config
        self._model = model
        self._text = text
        self._end_ids = frozenset(token for token in text.end_ids if token < model.vocab)
        self._rng = rng
        self._clock = SystemClock() if clock is None else clock
        self._on_load = on_load
        self._after_step = after_step
        self._on_decode = on_decode
        self._pool = BlockPool(config.blocks, config.block_size)
        self._scheduler = Scheduler(self._pool, config.limits)
        self._runner = Runner(model, kv, config.block_size)
        self._kept = KeptTable(config.lease_s)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live: dict[str, Live] = {}
        self._orphans: dict[str, Request] = {}  # ended while something outside writes to their blocks
        self._arrivals = itertools.count()
        self._totals = Totals()
        self._steps = StepTotals(active_experts=(0,) * model.geometry.layers)
        self._finished: Counter[FinishReason] = Counter()
        self._problem: str | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    # --- for any thread -----------------------------------------------------------------------------

    def submit(self, submission: Submission, sink: Sink) -> None:
        """Take a request; `sink` hears of it until a `TokenOutput` with `finish`.

        Raises:
            RequestError: it is malformed, too long for the model or the cache, or its id is in use.
            EngineError: the engine has stopped.
        """
        limit = self._check(submission)
        with self._lock:
            if self._problem is not None:
                raise EngineError(f"the engine has stopped: {self._problem}")
            if submission.id in self._live or submission.id in self._kept or submission.id in self._orphans:
                raise RequestError(f"request id {submission.id!r} is in use")
            request = self._request(submission, limit)
            self._live[request.id] = Live(request, sink, self._text.detokenizer(submission.prompt_ids))
            self._orders.put(partial(self._scheduler.add, request))

    def abort(self, request_id: str) -> None:
        """End a request, if it is still there; blocks that it keeps for another engine are released too."""
        self._orders.put(partial(self._abort, request_id))

    def loaded(self, request_id: str) -> None:
        """The blocks of its `LoadJob` are filled."""
        self._orders.put(partial(self._loaded, request_id))

    def load_failed(self, request_id: str, problem: str) -> None:
        """The blocks of its `LoadJob` will not be filled, and nothing writes to them any more."""
        self._orders.put(partial(self._load_failed, request_id, problem))

    def handoff(self, request_id: str) -> KeptBlocks | None:
        """The blocks of a finished prompt that wait for another engine; None where their lease has ended."""
        return self._kept.find(request_id)

    def release_handoff(self, request_id: str) -> bool:
        """Take back the blocks of a finished prompt; False where that has happened already."""
        released = self._kept.release(request_id)
        self._orders.put(_nothing)
        return released

    def renew_handoff(self, request_id: str) -> bool:
        """Start the lease of a finished prompt anew; False where it has ended."""
        return self._kept.renew(request_id, self._clock.now())

    @property
    def problem(self) -> str | None:
        """Why the engine has stopped; None while it runs."""
        return self._problem

    def stats(self) -> Stats:
        """Figures of this moment; those of a step at hand are not in yet."""
        tally, scheduler = self._scheduler.tally, self._scheduler
        return Stats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            loading=scheduler.loading,
            kept=len(self._kept),
            kv_usage=self._pool.held / self._pool.blocks,
            preemptions=tally.preemptions,
            prefix_queries=tally.prefix_queries,
            prefix_hits=tally.prefix_hits,
            fetched=tally.fetched,
            finished=dict(self._finished),
            **dataclasses.asdict(self._totals),
            **dataclasses.asdict(self._steps),
        )

    def start(self) -> None:
        """Run steps in a thread of its own."""
        self._thread = threading.Thread(target=self.run, name="coterie-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all requests and the thread, after the step at hand."""
        self._closing = True
        self._orders.put(_nothing)
        if self._thread is not None:
            self._thread.join()

    # --- the engine's thread ------------------------------------------------------------------------

    def run(self) -> None:
        """Step until `close`, or until a step fails: then every request ends with an error."""
        try:
            while not self._closing:
                if not self.step():
                    self._wait()
            self._stop("it was closed")
        except Exception as error:
            log.exception("the engine stops: a step failed")
            self._stop(f"a step failed: {error}")

    def step(self) -> bool:
        """Take what was ordered and compute one step; False where there was nothing to compute."""
        began_s, cpu_s = self._clock.now(), time.thread_time()
        self._take_orders()
        step = self._scheduler.plan()
        self._runner.restart(step.fresh)
        for job in step.loads:
            assert self._on_load is not None, "checked when it was submitted"
            self._on_load(job)
        if step.work:
            before = self._steps
            try:
                computed = self._runner.run(step)
            except StepError as error:
                self._fail(error)
            else:
                self._scheduler.done(step)
                self._note(step, computed)
                self._sample(step, computed)
                self._count(step, time.thread_time() - cpu_s)
                self._tell_decode(step, before, self._clock.now() - began_s)
        self._after_step()
        return bool(step.work)

    def _fail(self, error: StepError) -> None:
        """Some of a step cannot be computed: its requests end; what else was in the step is planned again."""
        log.error("a step failed for %d requests: %s", len(error.work), error)
        for work in error.work:
            self._leave(work.request)
            self._tell_end(self._live[work.request.id], "error", problem=str(error))

    def _count(self, step: Step, cpu_s: float) -> None:
        before = self._steps
        self._steps = StepTotals(
            before.steps + 1,
            before.step_tokens + sum(work.length for work in step.work),
            tuple(self._runner.active_experts.tolist()),
            before.step_cpu_s + cpu_s,
        )

    def _tell_decode(self, step: Step, before: StepTotals, seconds: float) -> None:
        if self._on_decode is None or any(work.length > 1 for work in step.work):
            return
        active = sum(self._steps.active_experts) - sum(before.active_experts)
        self._on_decode(StepPoint(len(step.work), active, seconds))

    def _note(self, step: Step, computed: Computed) -> None:
        """Remember the experts that are wanted, while the blocks are as the step left them."""
        for work, ids in zip(step.work, computed.ids, strict=True):
            live, request = self._live[work.request.id], work.request
            live.note(work, ids)
            if work.samples and not request.output_tokens:
                self._totals.prompt_tokens += request.prompt_tokens
                if live.wants_prompt_counts:
                    live.prompt_counts = self._runner.counts(request.blocks, request.prompt_tokens)

    def _sample(self, step: Step, computed: Computed) -> None:
        requests = [work.request for work in step.work if work.samples]
        tokens = sample(computed.logits, [request.draw() for request in requests])
        for request, token in zip(requests, tokens, strict=True):
            if token is None:
                self._leave(request)
                self._tell_end(self._live[request.id], "error", problem=_NO_LOGITS)
            else:
                self._advance(self._live[request.id], token)

    def _advance(self, live: Live, token: int) -> None:
        request = live.request
        self._totals.output_tokens += 1
        text, reason, stop_reason = live.advance(token)
        if reason is None:
            live.sink(TokenOutput(request.id, token, text))
        else:
            kept = self._leave(request, keep=request.submission.keep)
            self._tell_end(live, reason, token=token, text=text, stop_reason=stop_reason, kept=kept)

    def _leave(self, request: Request, *, keep: bool = False) -> KeptBlocks | None:
        """Take a request out of the scheduler; its blocks stay where another engine is to copy them."""
        blocks = tuple(request.blocks)
        self._scheduler.remove(request, keep_blocks=keep)
        return self._kept.keep(request.id, blocks, request.computed, self._clock.now()) if keep else None

    def _tell_end(
        self,
        live: Live,
        reason: FinishReason,
        *,
        token: int | None = None,
        text: str = "",
        stop_reason: str | int | None = None,
        problem: str | None = None,
        kept: KeptBlocks | None = None,
    ) -> None:
        request = live.request
        counts, ids = live.output_experts(self._model.geometry)
        finish = Finish(
            reason,
            request.prompt_tokens,
            request.output_tokens,
            stop_reason=stop_reason,
            problem=problem,
            cached_tokens=request.cached_tokens or 0,
            prompt_counts=live.prompt_counts,
            output_counts=counts,
            output_ids=ids,
            kept=kept,
        )
        del self._live[request.id]
        self._finished[reason] += 1
        live.sink(TokenOutput(request.id, token, text, finish))

    # --- orders -------------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        while not self._orders.empty():
            self._orders.get()()
        for kept in self._kept.collect(self._clock.now()):
            self._pool.release(kept.blocks)

    def _wait(self) -> None:
        """Until there is an order or a lease runs out."""
        expiry_s = self._kept.next_expiry_s()
        timeout_s = None if expiry_s is None else max(0.0, expiry_s - self._clock.now())
        try:
            order = self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return
        order()

    def _abort(self, request_id: str) -> None:
        self._kept.release(request_id)
        live = self._live.get(request_id)
        if live is None:
            return
        if self._scheduler.is_loading(live.request):
            self._orphans[request_id] = live.request
        else:
            self._leave(live.request)
        self._tell_end(live, "abort")

    def _loaded(self, request_id: str) -> None:
        if request_id in self._orphans:
            self._scheduler.unload(self._orphans.pop(request_id))
        else:
            self._scheduler.loaded(self._live[request_id].request)

    def _load_failed(self, request_id: str, problem: str) -> None:
        if request_id in self._orphans:
            self._scheduler.unload(self._orphans.pop(request_id))
        else:
            live = self._live[request_id]
            self._scheduler.unload(live.request)
            self._tell_end(live, "error", problem=problem)

    def _stop(self, problem: str) -> None:
        with self._lock:
            self._problem = problem
        for live in list(self._live.values()):
            self._tell_end(live, "error", problem=f"the engine has stopped: {problem}")
        self._after_step()

    # --- checks -------------------------------------------------------------------------------------

    def _request(self, submission: Submission, limit: int) -> Request:
        params = submission.params
        if params.seed is None and not params.greedy:
            params = dataclasses.replace(params, seed=int(self._rng.integers(1 << 63)))
        own = frozenset() if params.ignore_eos else self._end_ids
        return Request(
            submission,
            next(self._arrivals),
            limit,
            params,
            params.stop_token_ids | own,
            list(submission.prompt_ids),
            load_tokens=submission.load_tokens,
        )

    def _check(self, submission: Submission) -> int:
        """Check a submission; the most tokens that its output may have."""
        self._check_tokens("prompt", submission.prompt_ids)
        self._check_tokens("stop_token_ids", submission.params.stop_token_ids)
        prompt, params = len(submission.prompt_ids), submission.params
        if not prompt:
            raise RequestError("prompt: it has no tokens", "prompt")
        if params.min_tokens and len(params.stop_token_ids | self._end_ids) >= self._model.vocab:
            raise RequestError("min_tokens: every token would end the output; name fewer stop_token_ids", "min_tokens")
        if not 0 <= submission.load_tokens <= (prompt if self._on_load else 0):
            raise RequestError(f"this engine cannot load {submission.load_tokens} of {prompt} tokens from elsewhere")
        room = min(self.config.max_model_len, self._pool.tokens + 1) - prompt
        wanted = params.max_tokens or max(1, params.min_tokens)
        if room < wanted:
            raise self._too_long(prompt, wanted)
        return params.max_tokens or room

    def _check_tokens(self, name: str, tokens: Collection[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._model.vocab:
            wrong = next(token for token in tokens if not 0 <= token < self._model.vocab)
            raise RequestError(f"{name}: {wrong} is not a token; they are 0 to {self._model.vocab - 1}", name)

    def _too_long(self, prompt: int, wanted: int) -> RequestError:
        config = self.config
        if prompt + wanted > config.max_model_len:
            room, remedy = f"the model takes {config.max_model_len}", ""
        else:  # the last token is not forwarded, so it needs no room
            room = f"the cache holds {config.blocks} blocks of {config.block_size}, so {self._pool.tokens + 1}"
            remedy = ", or start the engine with more blocks"
        param = "prompt" if prompt >= min(config.max_model_len, self._pool.tokens + 1) else "max_tokens"
        return RequestError(
            f"the prompt has {prompt} tokens and the output up to {wanted}, together {prompt + wanted}, but {room}; "
            f"shorten the prompt or lower max_tokens{remedy}",
            param,
        )
