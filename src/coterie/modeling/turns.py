"""Parts of a step that take turns: while one waits for its experts, the other computes (EaaS, arXiv 2509.17863).

    first    attention 0 │             │ experts 0, attention 1 │                        │ ...
    second               │ attention 0 │                        │ experts 0, attention 1 │

In each layer the first part is ahead, so the second may begin within a request: it finds the keys and values there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from coterie.errors import EngineError
from coterie.modeling.layers import Begun
from coterie.modeling.tiles import Floats

Steps = Generator[None, None, Floats]
"""Yields where others may compute, and returns hidden states `[T, D]`."""


class PartError(EngineError):
    """The experts of some tokens of a step cannot be computed now.

    Attributes:
        tokens: which tokens: one or several parts of the step.
    """

    def __init__(self, message: str, *tokens: slice) -> None:
        super().__init__(message)
        self.tokens = tokens


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tokens of a step, and what computes them."""

    tokens: slice
    steps: Steps


def sums_of(begun: Begun) -> Steps:
    """Let others compute before experts are waited for; if they are not waited for in the end, they are cancelled."""
    try:
        yield
    except GeneratorExit:
        begun.cancel()
        raise
    return begun.finish()


def take_turns(parts: Sequence[Part]) -> list[Floats]:
    """Run each part up to where it waits, in their order and again, until all have ended.

    Args:
        parts: which wait equally often.

    Raises:
        PartError: the experts of one part or several cannot be computed.  After the first that fails, each other has
            one more turn, to see whether its experts are there, and is given up.
    """
    results, waiting = [], deque(parts)
    failed: list[tuple[slice, EngineError]] = []
    try:
        while waiting:
            part = waiting.popleft()
            try:
                next(part.steps)
            except StopIteration as end:
                results.append(end.value)
            except EngineError as error:
                failed.append((part.tokens, error))
            else:
                if not failed:
                    waiting.append(part)
    finally:
        for part in parts:
            part.steps.close()
    if failed:
        tokens, (first, *_) = zip(*failed, strict=True)
        raise PartError(str(first), *tokens) from first
    return results
