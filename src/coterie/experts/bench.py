"""How fast a model's experts reply: client processes of this host ask with random tokens, as fast as they can."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError

import msgspec
import numpy as np
import numpy.typing as npt

from coterie.errors import EngineError, InputError
from coterie.experts.client.model_experts import ExpertsConfig, ModelExperts, experts_of
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import ServerRow, Status
from coterie.modeling.expert_tensors import ExpertModel, read_expert_model
from coterie.modeling.gates import Choice
from coterie.modeling.tiles import Floats

_SETS = 16  # of tokens, with which a client asks in turn
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is asked, of whom.

    Attributes:
        checkpoint: folder of the model; its configuration alone is read.
        monitor: URL of the monitor of its experts.
        tokens: of a call; each number is tried.
        clients: processes that ask at once.
        seconds: how long, with each number of tokens.

    Raises:
        InputError: there is nothing to ask, nobody who asks, or no time.
    """

    checkpoint: Path
    monitor: str
    tokens: tuple[int, ...] = (1, 16, 64)
    clients: int = 1
    seconds: float = 3.0

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1 or self.clients < 1 or not self.seconds > 0:
            raise InputError(
                f"experts bench: {self.clients} clients with {self.tokens} tokens for {self.seconds} s; "
                "all must be positive"
            )


class BenchRow(msgspec.Struct, frozen=True):
    """What came of calls of one size.

    Attributes:
        tokens: of a call.
        calls_per_s: of all clients together.
        p50_ms: median of the time that a call took.
        p99_ms: of 100 calls, 99 took no longer.
        requests_per_batch: how many requests the servers merged, on average; None if they computed none.
    """

    tokens: int
    calls_per_s: float
    p50_ms: float
    p99_ms: float
    requests_per_batch: float | None


class _Done(msgspec.Struct):
    """What is read of a server's report."""

    merged: int
    batches: int


def measure(config: BenchConfig) -> list[BenchRow]:
    """Ask for one layer after the other, with each number of tokens.

    Raises:
        CoterieError: monitor or experts cannot be reached, or the model's configuration cannot be read.
    """
    context = multiprocessing.get_context("spawn")  # clients have threads
    barrier = context.Barrier(config.clients + 1)
    with ProcessPoolExecutor(config.clients, context, _enter, (barrier,)) as pool:
        asked = [pool.submit(_ask, config, seed) for seed in range(config.clients)]
        for one in asked:
            one.add_done_callback(lambda done: barrier.abort() if done.exception() else None)
        counts: list[tuple[int, int]] = []
        try:
            for _ in config.tokens:
                barrier.wait()
                before = _counts(config.monitor)
                barrier.wait()
                barrier.wait()
                after = _counts(config.monitor)
                counts.append((after[0] - before[0], after[1] - before[1]))
        except BrokenBarrierError:
            pass  # a client says why
        except BaseException:
            barrier.abort()  # the clients wait there
            raise
        times = _results(asked)
    return [_row(config, *row) for row in zip(config.tokens, zip(*times, strict=True), counts, strict=True)]


def _results(asked: Sequence[Future[list[Times]]]) -> list[list[Times]]:
    errors = [error for one in asked if (error := one.exception())]
    for error in errors:
        if not isinstance(error, BrokenBarrierError):
            raise error
    return [one.result() for one in asked]


def _row(config: BenchConfig, tokens: int, times: Sequence[Times], counts: tuple[int, int]) -> BenchRow:
    every = np.concatenate(times)
    p50_ms, p99_ms = np.percentile(every, (50, 99)) * 1e3
    requests, batches = counts
    return BenchRow(
        tokens, len(every) / config.seconds, float(p50_ms), float(p99_ms), requests / batches if batches else None
    )


def _counts(monitor: str) -> tuple[int, int]:
    """Requests and batches of all servers that live."""
    servers = ask(monitor, "GET", "/status", Status).servers
    done = [_done(server) for server in servers if server.state not in ("joining", "dead")]
    return sum(one.merged for one in done), sum(one.batches for one in done)


def _done(server: ServerRow) -> _Done:
    try:
        return ask(server.url, "GET", "/load", _Done)
    except EngineError:
        raise EngineError(
            f"expert server {server.name} at {server.url} does not say what it has done; if it was lost, try again"
        ) from None


# --- in a client's process ----------------------------------------------------------------------------------

_barriers: list[Barrier] = []  # the one that the process was started with


def _enter(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _ask(config: BenchConfig, seed: int) -> list[Times]:
    """Seconds that each call took, by number of tokens."""
    model, rng, (barrier,) = read_expert_model(config.checkpoint), np.random.default_rng(seed), _barriers
    times = []
    with experts_of(config.checkpoint, ExpertsConfig(config.monitor, f"bench {seed}")) as experts:
        for tokens in config.tokens:
            sets = [_tokens(model, rng, tokens) for _ in range(_SETS)]
            _time_calls(experts, model, sets, 0.1)  # warm-up
            barrier.wait()
            barrier.wait()
            times.append(_time_calls(experts, model, sets, config.seconds))
            barrier.wait()
    return times


def _time_calls(
    experts: ModelExperts, model: ExpertModel, sets: Sequence[tuple[Floats, Choice]], seconds: float
) -> Times:
    times: list[float] = []
    now_s = time.monotonic()
    end_s = now_s + seconds
    while now_s < end_s:
        rows, choice = sets[len(times) % len(sets)]
        experts.start(len(times) % model.geometry.layers, rows, choice).finish()
        before_s, now_s = now_s, time.monotonic()
        times.append(now_s - before_s)
    return np.array(times)


def _tokens(model: ExpertModel, rng: np.random.Generator, count: int) -> tuple[Floats, Choice]:
    geometry = model.geometry
    ids = rng.permuted(np.tile(np.arange(geometry.experts), (count, 1)), axis=1)[:, : geometry.top_k]
    rows = rng.standard_normal((count, model.hidden), np.float32)
    return rows, Choice(np.ascontiguousarray(ids), rng.random(ids.shape, np.float32))
