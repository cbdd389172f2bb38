"""Where expert counts come from: what `collect` needs of a server or of a checkpoint."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from coterie.activations import TraceRecord
from coterie.calibration.prompts import Prompt


class Source(Protocol):
    """Runs one prompt at a time, greedy and for a fixed number of tokens, and says which experts were used.

    A context manager: what it holds (connections, a model) lives from entering to leaving.  Several
    `record` calls may be in flight at once.

    Attributes:
        records: what it records, in a few words that tell it from every other source and setting, such as
            `counts and ids by the plugin`: a collection that was begun with other words does not go on.
    """

    records: str

    async def model(self) -> str:
        """Name of the model, for the trace.

        Raises:
            InputError: there is none, or several to choose from.
            EngineError: the server cannot be reached or answers wrongly.
        """
        ...

    async def record(self, prompt: Prompt, max_tokens: int) -> TraceRecord:
        """Run one prompt.

        Args:
            prompt: what to run.
            max_tokens: tokens to generate, at least 2; end-of-text tokens are ignored.

        Raises:
            EngineError: naming the prompt's place in its file, and what went wrong.
            UnsupportedError: the source cannot say which experts were used; the message says what would.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
