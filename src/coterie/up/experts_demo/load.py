"""Streams without end, and when their tokens came."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from coterie.calibration.prompts import Prompt
from coterie.errors import EngineError
from coterie.up.demo.client import stream_tokens

_TIMEOUT = httpx.Timeout(60.0)


@dataclass(slots=True)
class Seen:
    """What clients saw, in seconds of one clock.

    Attributes:
        arrivals: when tokens came, and how many.
        pauses: when one ended, and how long it was: the time between two tokens of a stream.
        finished: when requests ended well.
        errors: when others ended, and why.
    """

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    errors: list[tuple[float, str]] = field(default_factory=list)

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens in a second."""
        tokens = sum(count for at_s, count in self.arrivals if from_s <= at_s < to_s)
        return tokens / (to_s - from_s)


class Load:
    """Requests, one after the other in each of `streams` streams.

    Args:
        url: where they are sent.
        model: what it is called.
        prompts: asked in turn, again and again.
        streams: how many at a time.
        max_tokens: output tokens of each.
        now: the clock.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[Prompt],
        *,
        streams: int,
        max_tokens: int,
        now: Callable[[], float],
    ) -> None:
        self.seen = Seen()
        self._url, self._model, self._streams, self._max_tokens, self._now = url, model, streams, max_tokens, now
        self._turns = enumerate(itertools.cycle(prompts))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests until the context ends, then let those finish that are under way."""
        over = asyncio.Event()
        limits = httpx.Limits(max_connections=self._streams)
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT, limits=limits, trust_env=False) as client:
            streams = [asyncio.create_task(self._stream(client, over)) for _ in range(self._streams)]
            try:
                yield
                over.set()
                await asyncio.gather(*streams)
            finally:
                for stream in streams:
                    stream.cancel()

    async def _stream(self, client: httpx.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            number, prompt = next(self._turns)
            try:
                await self._request(client, f"demo-{number}", prompt)
                self.seen.finished.append(self._now())
            except (httpx.HTTPError, EngineError) as error:
                self.seen.errors.append((self._now(), str(error) or type(error).__name__))

    async def _request(self, client: httpx.AsyncClient, id_: str, prompt: Prompt) -> None:
        last_s = None
        async for new in stream_tokens(client, self._model, id_, prompt, self._max_tokens):
            now_s = self._now()
            self.seen.arrivals.append((now_s, len(new)))
            if last_s is not None:
                self.seen.pauses.append((now_s, now_s - last_s))
            last_s = now_s
