"""The parts of a worker, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coterie.engines.embedded.bodies import Chat
from coterie.engines.embedded.engine import Engine
from coterie.engines.embedded.loads import Loads
from coterie.engines.embedded.mailbox import Mailbox
from coterie.engines.embedded.metrics import Metrics
from coterie.engines.embedded.text import Tokenizer

WorkerRole = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """The parts of a worker that its HTTP side uses.

    Attributes:
        model: name that it serves.
        root: folder of the checkpoint.
        role: which parts of a divided request it takes.
        engine: computes.
        engine_id: of its KV cache.
        address: where its KV is asked for.
        tokenizer: of the model.
        mailbox: brings the engine's news.
        loads: fetches remote KV.
        metrics: of the worker.
        started_s: seconds since 1970.
    """

    model: str
    root: str
    role: WorkerRole
    engine: Engine
    engine_id: str
    address: tuple[str, int]
    tokenizer: Tokenizer
    mailbox: Mailbox
    loads: Loads
    metrics: Metrics
    started_s: int

    def encode(self, prompt: str | Chat) -> list[int]:
        """Tokens of a prompt or a conversation."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat(prompt.messages, prompt.extra, prompt=prompt.generation_prompt)
