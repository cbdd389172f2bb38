"""A model whose every answer depends on all tokens before it, as it finds them in the cache, and an engine around it.

The cache holds the tokens themselves: a block that was handed to the wrong request, or not filled, changes outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from coterie.clock import ManualClock
from coterie.core import ModelGeometry
from coterie.engines.embedded.engine import Engine, EngineConfig
from coterie.engines.embedded.request import Finish, LoadJob, Submission, TokenOutput
from coterie.engines.embedded.sampling import Draw, SamplingParams, sample
from coterie.engines.embedded.scheduler import Limits
from coterie.engines.embedded.text import Detokenizer
from coterie.modeling import StepBatch, StepOutput

GEOMETRY = ModelGeometry(layers=2, experts=6, top_k=2)
VOCAB = 8
BLOCK = 4
END = 7
EMPTY = -1.0


@cache
def digest(prefix: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(bytes(prefix)).digest()


@cache
def logits_after(prefix: tuple[int, ...]) -> np.ndarray:
    """`[V]`, with ties: there are 4 values for 8 tokens."""
    return (np.frombuffer(digest(prefix)[:VOCAB], np.uint8) % 4).astype(np.float32)


@cache
def experts_of(prefix: tuple[int, ...]) -> np.ndarray:
    """`[L, k]` experts of the last token of `prefix`."""
    keys = np.frombuffer(digest(prefix)[VOCAB : VOCAB + 12], np.uint8).reshape(2, 6)
    return keys.argsort(axis=1, kind="stable")[:, :2].astype(np.uint8)


def counts_of(tokens: Sequence[int], start: int, end: int) -> np.ndarray:
    """`[L, E]` experts of the tokens from `start` to `end` of a text."""
    counts = np.zeros((2, 6), int)
    for position in range(start, end):
        for layer, ids in enumerate(experts_of(tuple(tokens[: position + 1]))):
            counts[layer, ids] += 1
    return counts


class ToyModel:
    geometry = GEOMETRY
    vocab = VOCAB

    def __init__(self) -> None:
        self.largest_step = 0
        self.forwarded = 0

    def forward(self, batch: StepBatch, kv: np.ndarray) -> StepOutput:
        self.largest_step = max(self.largest_step, len(batch.token_ids))
        self.forwarded += len(batch.token_ids)
        prefixes = []
        for (start, length), table in zip(batch.rows, batch.block_tables, strict=True):
            own = slice(start, start + length)
            for token, position in zip(batch.token_ids[own], batch.positions[own], strict=True):
                kv[table[position // BLOCK], position % BLOCK] = token
            last = int(batch.positions[own][-1])
            cached = kv[table].reshape(-1)[: last + 1]
            assert (cached != EMPTY).all(), "a token that nobody computed is read"
            text = tuple(cached.astype(int).tolist())
            prefixes += [text[: position + 1] for position in batch.positions[own].tolist()]
        logits = [logits_after(prefixes[row]) for row in batch.logits_rows.tolist()]
        return StepOutput(np.array(logits, np.float32).reshape(-1, VOCAB), np.stack([experts_of(p) for p in prefixes]))


class ToyText:
    """Each token is a letter, but for the two halves of a character."""

    end_ids = frozenset({END})
    pieces = (b"a", b"b", b"c", b" ", b"\xc3", b"\xa9", b"ab", b"")

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return Detokenizer(self.pieces, before)


def expected_tokens(prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """Output of a request on its own, without an engine; without stop strings."""
    tokens = list(prompt)
    end_ids = params.stop_token_ids | (frozenset() if params.ignore_eos else ToyText.end_ids)
    while len(tokens) < len(prompt) + params.max_tokens:
        forbidden = end_ids if len(tokens) - len(prompt) < params.min_tokens else frozenset()
        draw = Draw(params, choice, len(tokens), forbidden)
        tokens += sample(logits_after(tuple(tokens))[None], [draw])
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


class Story:
    """An engine that a test drives step by step, and all that its sinks heard."""

    def __init__(self, blocks: int = 64, *, max_model_len: int = 200, lease_s: float = 30.0, **limits) -> None:
        self.clock = ManualClock()
        self.model = ToyModel()
        self.kv = np.full((blocks, BLOCK), EMPTY, np.float32)
        self.heard: dict[str, list[TokenOutput]] = {}
        self.jobs: list[LoadJob] = []
        config = EngineConfig(blocks, BLOCK, max_model_len, lease_s, Limits(**limits))
        self.engine = Engine(
            self.model,
            ToyText(),
            self.kv,
            config,
            rng=np.random.default_rng(0),
            clock=self.clock,
            on_load=self.jobs.append,
        )
        self.pool = self.engine._pool

    def submit(self, name: str, prompt: Sequence[int], **kw) -> None:
        """Fields of `Submission` go there, all others to `SamplingParams`; greedy unless said otherwise."""
        own = {key: kw.pop(key) for key in ("choice", "asked", "keep", "load_tokens") if key in kw}
        self.heard[name] = []
        params = SamplingParams(**{"temperature": 0.0, **kw})
        self.engine.submit(Submission(name, tuple(prompt), params, **own), self.heard[name].append)

    def run(self, most: int = 10_000) -> int:
        """Step until there is nothing to do; how many steps that took."""
        for steps in range(most):
            if not self.engine.step():
                return steps
            self.pool.check()
        raise AssertionError(f"still busy after {most} steps")

    def fill(self, job: LoadJob, prompt: Sequence[int]) -> None:
        """Do what a load does: write the tokens of the prompt to the job's blocks."""
        for number, block in enumerate(job.blocks, job.first):
            own = prompt[number * BLOCK : (number + 1) * BLOCK]
            self.kv[block, : len(own)] = own

    def tokens(self, name: str) -> list[int]:
        return [news.token_id for news in self.heard[name] if news.token_id is not None]

    def text(self, name: str) -> str:
        return "".join(news.text for news in self.heard[name])

    def finish(self, name: str) -> Finish:
        """How a request ended: said once, and last."""
        assert [news.finish is not None for news in self.heard[name]] == [False] * (len(self.heard[name]) - 1) + [True]
        return self.heard[name][-1].finish


# --- requests that several tests submit ---------------------------------------------------------------

PROMPTS = [
    [1, 2, 3, 4, 5, 6, 0, 1, 2],
    [1, 2, 3, 4, 5, 6, 0, 1, 3, 3, 3],
    [1, 2, 3, 4, 0],
    [2],
    [1, 2, 3, 4, 5, 6, 0, 1],
    [6, 5, 4, 3, 2, 1] * 4,
]


def params_of(number, **changes):
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.6, "top_p": 0.7, "seed": 8, "ignore_eos": True},
        {"temperature": 2.0, "top_k": 3, "seed": 9, "min_tokens": 6},
    ]
    return {**kinds[number % len(kinds)], "max_tokens": 5 + 3 * number, **changes}
