"""The demo's client: sends streamed requests through a gateway and notes when their tokens arrive."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from coterie.calibration.prompts import Prompt
from coterie.errors import EngineError
from coterie.metrics import RequestTimeline

_TIMEOUT = httpx.Timeout(300.0, connect=5.0)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request.

    Attributes:
        id: its `X-Request-Id`.
        prompt: what was asked.
        tokens: ids of the output tokens.
        timeline: when they arrived; None if the request failed.
        error: what went wrong, if anything.
    """

    id: str
    prompt: Prompt
    tokens: tuple[int, ...]
    timeline: RequestTimeline | None
    error: str | None = None


async def serve_all(
    url: str,
    model: str,
    asked: Sequence[tuple[str, Prompt]],
    *,
    max_tokens: int,
    concurrency: int,
    advance: Callable[[], None],
) -> list[Served]:
    """Send requests, each given as id and prompt, `concurrency` at a time; greedy, of fixed length, with their label.

    A request that fails is a result with its error, not an exception.
    """
    turn = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits, trust_env=False) as client:

        async def one(id_: str, prompt: Prompt) -> Served:
            async with turn:
                served = await _serve(client, model, id_, prompt, max_tokens)
            advance()
            return served

        return await asyncio.gather(*(one(id_, prompt) for id_, prompt in asked))


async def _serve(client: httpx.AsyncClient, model: str, id_: str, prompt: Prompt, max_tokens: int) -> Served:
    tokens: list[int] = []
    sent_s = first_s = last_s = time.monotonic()
    try:
        async for new in stream_tokens(client, model, id_, prompt, max_tokens):
            last_s = time.monotonic()
            first_s = first_s if tokens else last_s
            tokens += new
    except (httpx.HTTPError, EngineError) as error:
        return Served(id_, prompt, tuple(tokens), None, str(error) or type(error).__name__)
    if len(tokens) != max_tokens:
        return Served(id_, prompt, tuple(tokens), None, f"{len(tokens)} tokens instead of {max_tokens}")
    return Served(id_, prompt, tuple(tokens), RequestTimeline(sent_s, first_s, last_s, len(tokens)))


async def stream_tokens(
    client: httpx.AsyncClient, model: str, id_: str, prompt: Prompt, max_tokens: int
) -> AsyncIterator[list[int]]:
    """Send a request, greedy and of fixed length; yields the ids of its output tokens as they come.

    Raises:
        httpx.HTTPError: the server cannot be reached, or is lost.
        EngineError: it answers with an error, or cuts its stream.
    """
    body = {
        "model": model,
        **prompt.fields,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    headers = {"x-request-id": id_, **({"x-coterie-domain": prompt.label} if prompt.label else {})}
    async for chunk in _chunks(client, prompt.path, body, headers):
        if new := _token_ids(chunk):
            yield new


async def _chunks(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[Any]:
    """The events of a stream, up to its `[DONE]`."""
    async with client.stream("POST", path, json=body, headers=headers) as response:
        if response.status_code != 200:
            raise EngineError(
                f"status {response.status_code}: {(await response.aread())[:300].decode(errors='replace')}"
            )
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
    raise EngineError("the stream ended before its [DONE]")


def _token_ids(chunk: Any) -> list[int]:
    if "error" in chunk:
        raise EngineError(str(chunk["error"])[:300])
    return [token for choice in chunk.get("choices", []) for token in choice.get("token_ids") or []]
