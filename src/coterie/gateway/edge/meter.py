"""Counts the tokens of a reply as it goes by, for keys that have a limit on them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coterie.gateway.edge.http1 import Header
from coterie.gateway.edge.reply import Reply, Watcher

_TOTAL = b'"total_tokens":'
"""In a string it would be escaped, so no model's words are taken for it."""
_NUMBER = re.compile(rb"\s*(\d{1,15})[^\d]")
_OVERLAP_BYTES = 64
_EVENT_END = b"\n\n"


class MeteredReply(Reply):
    """A reply that counts its tokens.

    What the engine says in `usage` counts: all of them, the prompt's included.  A stream without it is taken to
    bring one token with each event.

    Args:
        inner: what is answered with.
    """

    __slots__ = ("_events", "_inner", "_last", "_total")

    def __init__(self, inner: Reply) -> None:
        super().__init__(inner.request, inner.connection)
        self._inner = inner
        self._events = 0
        self._last = b""
        self._total: int | None = None

    def watch(self, watcher: Watcher | None) -> None:
        """See `Reply.watch`."""
        self._inner.watch(watcher)

    def start(
        self, status: int, headers: Sequence[Header], first: bytes, *, framed: bool = True, lines: bytes = b""
    ) -> None:
        """See `Reply.start`."""
        super().start(status, headers, first, framed=framed, lines=lines)
        self._count(first)

    def write(self, data: bytes) -> None:
        """See `Reply.write`."""
        super().write(data)
        self._count(data)

    def tokens(self, prompt_tokens: int) -> int:
        """Tokens of prompt and reply, as far as they are known.

        Args:
            prompt_tokens: of the prompt, for replies that do not say.
        """
        return prompt_tokens + max(0, self._events - 1) if self._total is None else self._total

    def _count(self, data: bytes) -> None:
        self._events += data.count(_EVENT_END)
        data = self._last + data
        found = data.rfind(_TOTAL)
        number = _NUMBER.match(data, found + len(_TOTAL)) if found >= 0 else None
        if number is not None:
            self._total = int(number[1])
        self._last = data[-_OVERLAP_BYTES:]
