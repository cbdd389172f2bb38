"""A request in the engine, and the text and counts that it has given so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.embedded.request import FinishReason, Request, TokenOutput
from coterie.engines.embedded.scheduler import Work
from coterie.engines.embedded.stops import StopFinder
from coterie.wire import ASK_IDS, Ids, count_ids

Sink = Callable[[TokenOutput], None]
"""Hears of one request, in the engine's thread; must neither block nor raise."""


class OutputText(Protocol):
    """Text of one output, as its tokens come; see `text.Detokenizer`."""

    def add(self, token_id: int) -> str:
        """The whole characters that this token completes."""
        ...


class TextSource(Protocol):
    """What the engine needs of `text.Tokenizer`."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an output."""
        ...

    def detokenizer(self, before: Sequence[int]) -> OutputText:
        """For one output, which follows these tokens."""
        ...


class Live:
    """One request's output.

    Args:
        request: its state.
        sink: who hears of it.
        text: for its output.
    """

    def __init__(self, request: Request, sink: Sink, text: OutputText) -> None:
        self.request = request
        self.sink = sink
        self.prompt_counts: ExpertCounts | None = None
        self._text = text
        self._stops = StopFinder(request.params.stop)
        self._ids: list[Ids] = []  # [n, L, top_k] of consecutive output tokens
        self._noted = 0

    @property
    def wants_prompt_counts(self) -> bool:
        """Whether someone will read the experts of the prompt."""
        return self.request.submission.keep or self.request.submission.asked is not None

    def note(self, work: Work, ids: Ids) -> None:
        """Remember the experts of output tokens where they are wanted; computed anew, they would be the same."""
        if self.request.submission.asked is None:
            return
        new = self.request.prompt_tokens + self._noted - work.start
        if new < work.length:
            self._ids.append(ids[new:].copy())
            self._noted += work.length - new

    def advance(self, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        """Take the next token of the output.

        Returns:
            Text that can be shown, why the output ends with it, and the stop string or token that ended it.
        """
        request, params = self.request, self.request.params
        armed = request.may_stop
        request.tokens.append(token)
        if token in request.end_ids:  # before the least length it could not be chosen
            return self._stops.rest(), "stop", token if token in params.stop_token_ids else None
        text, stop = self._stops.add(self._text.add(token), armed=armed)
        if stop is not None:
            return text, "stop", stop
        if request.output_tokens == request.limit:
            return text + self._stops.rest(), "length", None
        return text, None, None

    def output_experts(self, geometry: ModelGeometry) -> tuple[ExpertCounts | None, Ids | None]:
        """Counts and ids of the forwarded output tokens, as far as they were asked for."""
        asked = self.request.submission.asked
        if asked is None:
            return None, None
        none = np.zeros((0, geometry.layers, geometry.top_k), np.uint8)
        ids: Ids = np.concatenate(self._ids) if self._ids else none
        counts = ExpertCounts(geometry, count_ids(ids, geometry.experts), len(ids), len(ids))
        return counts, ids if asked == ASK_IDS else None
