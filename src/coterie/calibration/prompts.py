"""The prompt files of `coterie collect` and of the demo: one JSON object a line.

    {"prompt": "text", "label": "code"}
    {"messages": [{"role": "user", "content": "text"}]}

The label is optional.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from coterie.core import prompt_hash
from coterie.decoding import UNREADABLE
from coterie.errors import InputError

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to be sent.

    Attributes:
        where: `file:line`, for messages.
        label: domain label; empty if none.
        text: the prompt, for `/v1/completions`; None for a chat.
        messages: the chat, for `/v1/chat/completions`; None for a plain prompt.
    """

    where: str
    label: str
    text: str | None
    messages: Sequence[dict[str, Any]] | None

    @property
    def hash(self) -> str:
        """`core.prompt_hash` of text or messages."""
        content = self.text if self.text is not None else self.messages
        assert content is not None
        return prompt_hash(content)

    @property
    def path(self) -> str:
        """The API path that takes it."""
        return "/v1/completions" if self.text is not None else "/v1/chat/completions"

    @property
    def fields(self) -> dict[str, Any]:
        """Its part of the request's body."""
        return {"prompt": self.text} if self.text is not None else {"messages": self.messages}


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A prompt file that was read and checked whole.

    Attributes:
        prompts: one a line.
        digest: identity of the file's bytes (BLAKE2b, 128 bits, hexadecimal).
    """

    prompts: tuple[Prompt, ...]
    digest: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    label: str = ""


_LINE = '{"prompt": TEXT} or {"messages": [...]}'
_decoder = msgspec.json.Decoder(_Line)


def read_prompts(path: Path) -> PromptFile:
    """Read a prompt file; blank lines at its end are allowed.

    Raises:
        InputError: naming the file and the first line that is not as it should be.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path}: more than {_MOST_BYTES} bytes; collect from fewer prompts at a time")
    lines = data.rstrip().split(b"\n")
    prompts = tuple(_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1))
    return PromptFile(prompts, hashlib.blake2b(data, digest_size=16).hexdigest())


def _read_line(line: bytes, where: str) -> Prompt:
    if not line.strip():
        raise InputError(f"{where}: a blank line, or an empty file; a line is {_LINE}")
    try:
        read = _decoder.decode(line)
    except UNREADABLE as error:
        raise InputError(f"{where}: {error}; a line is {_LINE}") from None
    if (read.prompt is None) == (read.messages is None):
        raise InputError(f"{where}: a line holds either prompt or messages")
    if not read.prompt and not read.messages:
        raise InputError(f"{where}: the prompt is empty")
    return Prompt(where, read.label, read.prompt, read.messages)
