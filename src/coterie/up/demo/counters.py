"""What decode engines count of their steps, read from their `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, dataclass

import httpx

from coterie.errors import EngineError

PERIOD_S = 0.2
_NAMES = ("coterie:engine_steps_total", "coterie:active_experts_total", "coterie:step_tokens_total")


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums since an engine's start, or differences of them.

    Attributes:
        steps: forward passes.  A decode engine computes one token of each request in a step, so that all of its
            steps are decode steps.
        active: sum over the steps of the different experts that the step read, mean over the MoE layers.
        rows: sum over the steps of the tokens that it computed, each of another request.
    """

    steps: float
    active: float
    rows: float

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


ZERO = Counters(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """What all decode engines together did in a short time.

    Attributes:
        at_s: its end, seconds since the watch began.
        counted: in that time.
    """

    at_s: float
    counted: Counters


class Watch:
    """Reads the counters of decode engines; those that count none (stock vLLM) are not asked again.

    Args:
        client: for the requests.
        urls: base URLs of the engines.
    """

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        self._client = client
        self._urls = urls

    async def read(self) -> Counters | None:
        """Sums over all engines; None if one of them does not count.

        Raises:
            EngineError: an engine did not answer.
        """
        found = await asyncio.gather(*(self._read(url) for url in self._urls))
        known = [one for one in found if one is not None]
        return sum(known, ZERO) if len(known) == len(found) else None

    async def _read(self, url: str) -> Counters | None:
        try:
            reply = (await self._client.get(f"{url}/metrics")).raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{url}/metrics: {error or type(error).__name__}") from None
        return parse(reply.text)

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[list[Sample]]:
        """A list that grows by a sample every `PERIOD_S`; it stays empty where nothing is counted."""
        samples: list[Sample] = []
        task = asyncio.create_task(self._sample(samples))
        try:
            yield samples
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _sample(self, samples: list[Sample]) -> None:
        start_s, last = time.monotonic(), await self.read()
        while last is not None:
            await asyncio.sleep(PERIOD_S)
            if (now := await self.read()) is not None:
                samples.append(Sample(time.monotonic() - start_s, now - last))
            last = now


def parse(text: str) -> Counters | None:
    """The counters in a page of Prometheus' text format; None if one is missing."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _NAMES:
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return Counters(*(found[name] for name in _NAMES)) if len(found) == len(_NAMES) else None
