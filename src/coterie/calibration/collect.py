"""Record which experts a set of prompts uses, from any `Source`.

Each prompt is run once, greedy and with `ignore_eos`, so that every output has the same length and a
trace depends on the model and the prompts alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from coterie.activations import ActivationTrace, TraceRecord, build_trace
from coterie.calibration.journal import Header, Journal
from coterie.calibration.prompts import Prompt, read_prompts
from coterie.calibration.source import Source
from coterie.errors import EngineError, InputError, TraceError
from coterie.files import check_target


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """What to collect.

    Attributes:
        prompts: prompt file.
        output: the trace to write; `output.partial` holds what is finished meanwhile.
        max_tokens: output tokens of each request; at least 2, since the last one is never forwarded.
        concurrency: requests in flight.
        seed: of the order in which prompts are sent.  A file is often sorted by domain or length; in random
            order the time left is a fair estimate.  The trace is in the file's order.
        force: replace an existing trace, and what was begun with other settings.
    """

    prompts: Path
    output: Path
    max_tokens: int = 64
    concurrency: int = 8
    seed: int = 0
    force: bool = False


class Reporter(Protocol):
    """Is told how a collection goes."""

    def begin(self, total: int, done: int) -> None:
        """Of `total` requests, `done` were finished by an earlier run."""
        ...

    def advance(self) -> None:
        """One more request is finished."""
        ...

    def notice(self, text: str) -> None:
        """Something happened that a person should know."""
        ...


async def run_collect(source: Source, options: CollectOptions, reporter: Reporter) -> ActivationTrace:
    """Run every prompt that an earlier run did not finish, and write the trace.

    Raises:
        InputError: the prompt file, an option or the partial file is not usable; nothing was run.
        EngineError: the source failed; what is finished is kept.
        UnsupportedError: the source cannot say which experts were used.
    """
    _check(options)
    file = read_prompts(options.prompts)
    async with source:
        model = await source.model()
        header = Header(model, file.digest, options.max_tokens, source.records)
        with Journal(_partial(options), header, file) as journal:
            journal.load(restart=options.force, notice=reporter.notice)
            reporter.begin(len(file.prompts), len(journal.records))
            ahead = _shuffled([i for i in range(len(file.prompts)) if i not in journal.records], options.seed)

            async def work() -> None:
                for position in ahead:  # shared by all workers
                    prompt = file.prompts[position]
                    record = await source.record(prompt, options.max_tokens)
                    _check_record(record, journal, prompt)
                    journal.add(position, record)
                    reporter.advance()

            await _run(work, options.concurrency)
            trace = build_trace(model, [journal.records[i] for i in range(len(file.prompts))])
            trace.save(options.output)
            journal.remove()
            return trace


def _partial(options: CollectOptions) -> Path:
    return options.output.with_name(options.output.name + ".partial")


def _check(options: CollectOptions) -> None:
    if options.max_tokens < 2:
        raise InputError(f"max_tokens is {options.max_tokens}; the last token is never forwarded, so at least 2")
    if options.concurrency < 1:
        raise InputError(f"concurrency is {options.concurrency}; at least 1")
    if options.output.exists() and not options.force:
        raise InputError(f"{options.output} exists; name another file, or pass --force to replace it")
    for written in (options.output, _partial(options)):
        check_target(written, [options.prompts])


def _check_record(record: TraceRecord, journal: Journal, prompt: Prompt) -> None:
    try:
        journal.check(record)
    except TraceError as error:
        raise EngineError(f"{prompt.where}: what was recorded fits no trace: {error}") from None


def _shuffled(positions: list[int], seed: int) -> Iterator[int]:
    return iter([int(i) for i in np.random.default_rng(seed).permutation(positions)])


async def _run(work: Callable[[], Awaitable[None]], workers: int) -> None:
    """Run workers side by side; the first error stops all of them."""

    async def one() -> None:
        await work()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(one())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
