"""Record which experts a set of prompts uses, from a vLLM server that runs the counts plugin.

Each prompt is sent once, greedy (`temperature` 0) and with `ignore_eos`, so that every output has the same
length and a trace depends on the model and the prompts alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coterie.activations import ActivationTrace, build_trace
from coterie.calibration.client import EngineClient
from coterie.calibration.journal import Entry, Header, Journal
from coterie.calibration.prompts import Prompt, read_prompts
from coterie.core import ExpertCounts
from coterie.errors import EngineError, InputError, UnsupportedError
from coterie.wire import OUTPUT_KEY, PROMPT_KEY, decode_counts

_PLUGIN = (
    '--kv-transfer-config \'{"kv_connector": "CountsConnector", "kv_role": "kv_both", '
    '"kv_connector_module_path": "coterie.vllm_plugin.connector"}\''
)


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """What to collect.

    Attributes:
        server: base URL of the engine.
        prompts: prompt file.
        output: the trace to write; `output.partial` holds what is finished meanwhile.
        model: name of the model; None takes the server's only one.
        max_tokens: output tokens of each request; at least 2, since the last one is never forwarded.
        concurrency: requests in flight.
        seed: of the order in which prompts are sent.  A file is often sorted by domain or length; in random
            order the time left is a fair estimate.  The trace is in the file's order.
        force: replace an existing trace, and what was begun with other settings.
    """

    server: str
    prompts: Path
    output: Path
    model: str | None = None
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


Sleep = Callable[[float], Awaitable[None]]


async def run_collect(options: CollectOptions, reporter: Reporter, *, sleep: Sleep = asyncio.sleep) -> ActivationTrace:
    """Send every prompt that an earlier run did not finish, and write the trace.

    Raises:
        InputError: the prompt file, an option or the partial file is not usable; nothing was sent.
        EngineError: the server cannot be reached or answered wrongly; what is finished is kept.
        UnsupportedError: the server does not run the plugin.
    """
    _check(options)
    file = read_prompts(options.prompts)
    async with EngineClient(options.server, notice=reporter.notice, sleep=sleep) as client:
        model = options.model or await client.only_model()
        header = Header(model, file.digest, options.max_tokens)
        with Journal(options.output.with_name(options.output.name + ".partial"), header, file) as journal:
            journal.load(restart=options.force, notice=reporter.notice)
            reporter.begin(len(file.prompts), len(journal.records))
            ahead = _shuffled([i for i in range(len(file.prompts)) if i not in journal.records], options.seed)

            async def work() -> None:
                for position in ahead:  # shared by all workers
                    journal.add(await _ask(client, header, file.prompts[position], position))
                    reporter.advance()

            await _run(work, options.concurrency)
            trace = build_trace(model, [journal.records[i] for i in range(len(file.prompts))])
            trace.save(options.output)
            journal.remove()
            return trace


def _check(options: CollectOptions) -> None:
    if options.max_tokens < 2:
        raise InputError(f"max_tokens is {options.max_tokens}; the last token is never forwarded, so at least 2")
    if options.concurrency < 1:
        raise InputError(f"concurrency is {options.concurrency}; at least 1")
    if options.output.exists() and not options.force:
        raise InputError(f"{options.output} exists; name another file, or pass --force to replace it")
    if not options.output.parent.is_dir():
        raise InputError(f"{options.output}: there is no folder {options.output.parent}")


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


async def _ask(client: EngineClient, header: Header, prompt: Prompt, position: int) -> Entry:
    body = {
        "model": header.model,
        **prompt.fields,
        "max_tokens": header.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": {PROMPT_KEY: "counts"},
    }
    try:
        entry = _read(await client.post(prompt.path, body), position, client.server)
        _check_covered(decode_counts(entry.prompt))
    except InputError as error:
        raise EngineError(f"{prompt.where}: {client.server} answered with damaged counts: {error}") from None
    except EngineError as error:
        raise EngineError(f"{prompt.where}: {error}") from None
    return entry


def _check_covered(prompt: ExpertCounts) -> None:
    if not prompt.covered:
        raise EngineError(
            f"none of the prompt's {prompt.tokens} tokens were counted: their KV came from outside the engine; "
            "collect from an engine without KV offloading"
        )


def _read(reply: dict[str, Any], position: int, server: str) -> Entry:
    envelopes = reply.get("kv_transfer_params") or {}
    if not isinstance(envelopes, dict) or not envelopes.keys() >= {PROMPT_KEY, OUTPUT_KEY}:
        raise UnsupportedError(
            f"{server} returned no expert counts: it does not run coterie's plugin; start vLLM with {_PLUGIN}"
        )
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if type(tokens) is not int:
        raise EngineError(f"{server} did not say how many tokens it generated")
    return Entry(position, envelopes[PROMPT_KEY], envelopes[OUTPUT_KEY], tokens)
