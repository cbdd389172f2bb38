"""One client's request in the engine: its choices, what is new of them, and their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from coterie.engines.embedded.bodies import Call
from coterie.engines.embedded.replies import Choice
from coterie.engines.embedded.request import Submission, TokenOutput
from coterie.engines.embedded.transfer import handoff_params
from coterie.engines.embedded.worker import Worker
from coterie.errors import CoterieError


class Generation:
    """A context manager: what has not ended when it is left is aborted.

    Attributes:
        choices: all, by index.
        delivered: whether the client has got the whole reply; set by whoever sends it.

    Args:
        worker: computes it.
        call: what was asked for.
        prompts: tokens of each prompt.
        id_: unique; the engine's ids begin with it.
    """

    def __init__(self, worker: Worker, call: Call, prompts: Sequence[Sequence[int]], id_: str) -> None:
        several = (prompt for prompt in prompts for _ in range(call.n))
        self.choices = [Choice(number, prompt) for number, prompt in enumerate(several)]
        self.delivered = False
        self._worker = worker
        self._call = call
        self._id = id_
        self._news: asyncio.Queue[tuple[Choice, TokenOutput]] = asyncio.Queue()
        self._running: set[int] = set()
        self._start_s = time.monotonic()
        self._last_s: dict[int, float] = {}

    async def __aenter__(self) -> Generation:
        """Submit all choices.

        Raises:
            RequestError: the engine refuses one.
            EngineError: the engine has stopped.
        """
        try:
            for choice in self.choices:
                self._submit(choice)
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def news(self) -> AsyncIterator[tuple[Choice, TokenOutput]]:
        """What is new, in order, until all choices have ended; the choice has it already."""
        while self._running:
            yield await self._next()

    def params(self, choice: Choice) -> dict[str, Any] | None:
        """`kv_transfer_params` of an ended choice."""
        assert choice.finish is not None
        finish, worker = choice.finish, self._worker
        envelopes = finish.envelopes()
        if finish.kept is None:
            return envelopes or None
        return handoff_params(
            self._name(choice), finish.kept, finish.cached_tokens, worker.engine_id, worker.address, envelopes
        )

    def _name(self, choice: Choice) -> str:
        return f"{self._id}-{choice.index}"

    def _submit(self, choice: Choice) -> None:
        call, name = self._call, self._name(choice)
        remote = call.transfer.remote
        submission = Submission(
            name,
            choice.prompt_ids,
            call.params,
            choice=choice.index % call.n,
            asked=call.transfer.asked,
            keep=call.transfer.keep,
            load_tokens=remote.tokens if remote else 0,
        )
        if remote:
            self._worker.loads.expect(name, remote)
        try:
            self._worker.engine.submit(submission, self._worker.mailbox.sink(partial(self._read, choice)))
        except CoterieError:
            self._worker.loads.forget(name)
            raise
        self._running.add(choice.index)

    def _read(self, choice: Choice, output: TokenOutput) -> None:
        """On the event loop, whether or not anybody still waits for it."""
        if output.finish is not None:
            self._worker.loads.ended(output.request_id)
        self._news.put_nowait((choice, output))

    async def _next(self) -> tuple[Choice, TokenOutput]:
        choice, output = await self._news.get()
        self._measure(choice, output)
        choice.text += output.text
        if output.token_id is not None:
            choice.token_ids.append(output.token_id)
        if output.finish is not None:
            choice.finish = output.finish
            self._running.discard(choice.index)
        return choice, output

    def _measure(self, choice: Choice, output: TokenOutput) -> None:
        now_s = time.monotonic()
        if output.token_id is not None:
            last_s = self._last_s.get(choice.index)
            histogram = self._worker.metrics.first_token_s if last_s is None else self._worker.metrics.between_tokens_s
            histogram.observe(now_s - (self._start_s if last_s is None else last_s))
            self._last_s[choice.index] = now_s
        if output.finish is not None:
            self._worker.metrics.whole_s.observe(now_s - self._start_s)

    def _end(self) -> None:
        """An ended choice that was not delivered may still keep blocks."""
        for choice in self.choices:
            if choice.index in self._running or not self.delivered:
                self._worker.engine.abort(self._name(choice))
        self._running.clear()
