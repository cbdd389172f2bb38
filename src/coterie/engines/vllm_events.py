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


def listed(event: bytes, key: bytes) -> bytes | None:
    """The list that a key begins, in JSON; None if there is none."""
    at = event.rfind(key)
    return None if at < 0 else event[at + len(key) - 1 : event.find(b"]", at) + 1]


def hide(event: bytes, key: bytes) -> bytes:
    """The event with null for the list that a key begins, as vLLM has it for those who did not ask for tokens."""
    at = event.rfind(key)
    return event if at < 0 else event[: at + len(key) - 1] + b"null" + event[event.find(b"]", at) + 1 :]
