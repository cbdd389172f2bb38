"""What latency means here: the only definitions of TTFT and TPOT."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.errors import InputError


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """When a client saw what of one streamed request.

    Attributes:
        sent_s: the request was sent; seconds of any one monotonic clock, as are the others.
        first_token_s: its first output token arrived.
        last_token_s: its last output token arrived.
        output_tokens: output tokens in all.
    """

    sent_s: float
    first_token_s: float
    last_token_s: float
    output_tokens: int

    def __post_init__(self) -> None:
        if not self.sent_s <= self.first_token_s <= self.last_token_s:
            raise InputError(
                f"request timeline: sent {self.sent_s}, first token {self.first_token_s} and "
                f"last token {self.last_token_s} are not in order"
            )
        if self.output_tokens < 1:
            raise InputError(f"request timeline: {self.output_tokens} output tokens; at least one arrived")

    @property
    def ttft_s(self) -> float:
        """Time to first token: from sending the request to its first output token."""
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: mean distance of its tokens after the first; None for a single token."""
        if self.output_tokens == 1:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)
