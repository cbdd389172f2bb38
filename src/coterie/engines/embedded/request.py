"""A request inside the engine, and what the engine says about it.

waiting ──> running ──> finished            tokens are computed here
waiting ──> loading ──> running ──> ...     keys and values of the prompt come from another engine
running ──> waiting                         preempted: its blocks are gone, its tokens are not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from coterie.core import ExpertCounts
from coterie.engines.embedded.blocks import BlockHash
from coterie.engines.embedded.sampling import Draw, SamplingParams
from coterie.wire import OUTPUT_IDS_KEY, OUTPUT_KEY, PROMPT_KEY, Ids, encode_counts, encode_ids

Asked = Literal["counts", "counts+ids"]
"""`wire.ASK_COUNTS` or `wire.ASK_IDS`."""
ASKED: tuple[Asked, ...] = get_args(Asked)
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """What a client asks of the engine.

    Attributes:
        id: unique among the requests in the engine.
        prompt_ids: tokens of the prompt.
        params: how the output is chosen, and when it ends.
        choice: number of this output among those that share the prompt (`n`), from 0.
        asked: whether experts of the prompt and the output are wanted, and of each output token.
        keep: whether the prompt's blocks stay after the end, for another engine to copy.
        load_tokens: tokens of the prompt, from the first on, whose keys and values another engine holds.
    """

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    choice: int = 0
    asked: Asked | None = None
    keep: bool = False
    load_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks that wait to be filled from outside; nothing else touches them until the engine hears how it went.

    Attributes:
        request_id: whose they are.
        first: number of the first of them in the prompt; those before were found here.
        blocks: in the order of the prompt, up to the last loaded token.
    """

    request_id: str
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks of a finished prompt that wait for another engine.

    Attributes:
        blocks: in the order of the prompt.
        tokens: of the prompt, whose keys and values they hold.
        expires_s: when the engine takes them back, by its clock.
    """

    blocks: tuple[int, ...]
    tokens: int
    expires_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """How a request ended.

    Attributes:
        reason: a stop string or end token; a limit; the client; or an error.
        stop_reason: the stop string or token of `stop_token_ids` that ended it.
        problem: what went wrong, for "error".
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens of the output, with the one that ended it.
        cached_tokens: tokens of the prompt that were found in the cache when the request was first admitted.
        prompt_counts: experts of the prompt, where asked for or kept, and computed.
        output_counts: experts of the forwarded output tokens, where asked for; the last token was not forwarded.
        output_ids: `[tokens, L, top_k]` of the same, where asked for.
        kept: the blocks that wait for another engine.
    """

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    stop_reason: str | int | None = None
    problem: str | None = None
    cached_tokens: int = 0
    prompt_counts: ExpertCounts | None = None
    output_counts: ExpertCounts | None = None
    output_ids: Ids | None = None
    kept: KeptBlocks | None = None

    def envelopes(self) -> dict[str, Any]:
        """Counts and ids as they travel, under the keys that coterie's plugin for vLLM uses."""
        found: dict[str, Any] = {}
        if self.prompt_counts is not None:
            found[PROMPT_KEY] = encode_counts(self.prompt_counts)
        if self.output_counts is not None:
            found[OUTPUT_KEY] = encode_counts(self.output_counts)
            if self.output_ids is not None:
                found[OUTPUT_IDS_KEY] = encode_ids(self.output_ids, self.output_counts.geometry.experts)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutput:
    """News of one request.

    Attributes:
        request_id: whose.
        token_id: the new token; None where the request ended without one.
        text: what can be shown now; whole characters, and nothing that may turn out to be a stop string.
        finish: how it ended, in the last news of a request.
    """

    request_id: str
    token_id: int | None
    text: str
    finish: Finish | None = None


@dataclass(slots=True, eq=False)
class Request:
    """State of a request; the scheduler and the engine write it.

    Attributes:
        submission: what was asked.
        arrival: its number; requests that came earlier go first.
        limit: most tokens of the output.
        params: those asked for, with a seed.
        end_ids: tokens that end the output.
        tokens: prompt and output.
        blocks: its KV blocks, in the order of its tokens.
        computed: tokens whose keys and values are in them.
        hashes: of its full blocks, as far as they were needed.
        published: of its blocks, the first so many can be found by hash.
        awaited: hash of a block that another request is computing, and this one waits for.
        load_tokens: tokens still to be loaded from outside.
        cached_tokens: tokens found in the cache at first admission; None before.
    """

    submission: Submission
    arrival: int
    limit: int
    params: SamplingParams
    end_ids: frozenset[int]
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    published: int = 0
    awaited: BlockHash | None = None
    load_tokens: int = 0
    cached_tokens: int | None = None

    @property
    def id(self) -> str:
        """The submission's."""
        return self.submission.id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.submission.prompt_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens of the output so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def left(self) -> int:
        """Tokens to compute before the next can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def may_stop(self) -> bool:
        """Whether the output has its least length, so that the token after it may end it."""
        return self.output_tokens >= self.params.min_tokens

    def draw(self) -> Draw:
        """What the next token is chosen by."""
        forbidden = frozenset() if self.may_stop else self.end_ids
        return Draw(self.params, self.submission.choice, len(self.tokens), forbidden)
