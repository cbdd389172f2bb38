"""The events of vLLM's streams, read as far as it takes to follow them."""

from __future__ import annotations

from typing import Annotated

import msgspec

DATA = b"data: "
DONE = b"data: [DONE]"
IDS_KEY = b'"token_ids":['
PROMPT_IDS_KEY = b'"prompt_token_ids":['
"""How lists of tokens begin.  A quote within a JSON string is escaped, so these bytes are never part of a text."""


_NO_RAW = msgspec.Raw(b"")
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Delta(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What is new of a chat; anything but text is refused."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct, gc=False):
    """What is new of an output."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[_Id] | None = None

    @property
    def shown(self) -> str:
        """New text."""
        return self.text or (self.delta is not None and self.delta.content) or ""

    def show(self, text: str) -> None:
        """Have other new text."""
        if self.delta is not None:
            self.delta.content = text
        else:
            self.text = text


class Event(msgspec.Struct, gc=False):
    """An event of a stream, without choices where it has token counts only."""

    choices: list[Choice] = []
    error: msgspec.Raw = _NO_RAW


read_event = msgspec.json.Decoder(Event).decode


class Alike:
    """Reads events that differ from one before in nothing but a text and its one token, as most events of a stream do.

    It takes a quarter of the time.  A quote within a JSON string is escaped, so what is between head and middle is the
    text, whole.

    Args:
        head: how they begin, up to the text.
        middle: what is between the text and the token.
        tail: how they end, from behind the token on.
    """

    __slots__ = ("_head", "_hidden", "_middle", "_tail")

    def __init__(self, head: bytes, middle: bytes, tail: bytes) -> None:
        self._head = head
        self._middle = middle
        self._tail = tail
        self._hidden = b"null" + tail[1:]

    @classmethod
    def like(cls, event: bytes, choice: Choice) -> Alike | None:
        """Of an event with this choice; None if it is not of the usual form."""
        key = b'"text":"' if choice.delta is None else b'"content":"'
        start = event.find(key) + len(key)
        text = event[start : event.find(b'"', start)]
        ids = event.find(IDS_KEY, start) + len(IDS_KEY)
        if choice.finish_reason is not None or not text or text != choice.shown.encode() or ids < start:
            return None
        return cls(event[:start], event[start + len(text) : ids], event[event.find(b"]", ids) :])

    def read(self, event: bytes) -> tuple[int, bytes] | None:
        """The token of such an event with some text, and the event with null for its tokens; None of any other."""
        head, middle = self._head, self._middle
        if not event.startswith(head) or not event.endswith(self._tail):
            return None
        at = event.find(middle, len(head))
        stop = at + len(middle)
        token = event[stop : -len(self._tail)]
        if at <= len(head) or len(token) > 9 or not token.isdigit():
            return None
        return int(token), event[: stop - 1] + self._hidden


def listed(event: bytes, key: bytes) -> bytes | None:
    """The list that a key begins, in JSON; None if there is none."""
    at = event.rfind(key)
    return None if at < 0 else event[at + len(key) - 1 : event.find(b"]", at) + 1]


def hide(event: bytes, key: bytes) -> bytes:
    """The event with null for the list that a key begins, as vLLM has it for those who did not ask for tokens."""
    at = event.rfind(key)
    return event if at < 0 else event[: at + len(key) - 1] + b"null" + event[event.find(b"]", at) + 1 :]
