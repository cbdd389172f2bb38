"""Writes OpenAI's completion and chat replies with vLLM's additions, and vLLM's of token ids, whole and as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from coterie.engines.embedded.request import Finish
from coterie.engines.embedded.transfer import FIELD

Form = Literal["completion", "chat", "tokens"]

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


def event(document: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + _encode(document) + b"\n\n"


def error_body(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """VLLM's error object; `kind` is such as "BadRequestError"."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(slots=True)
class Choice:
    """One output as far as it has come.

    Attributes:
        index: its number in the reply.
        prompt_ids: tokens of its prompt.
        text: so far.
        token_ids: so far.
        finish: how it ended; None while it runs.
    """

    index: int
    prompt_ids: Sequence[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None


class Replies:
    """The objects of one reply.

    Args:
        id_: of the reply.
        model: name to answer with.
        created: seconds since 1970.
        form: what kind of reply.
        with_ids: whether token ids are wanted beside text.
        with_usage: whether each chunk of a stream has its choice's token counts so far.
    """

    def __init__(self, id_: str, model: str, created: int, form: Form, *, with_ids: bool, with_usage: bool) -> None:
        self._form = form
        self._with_ids = with_ids
        self._with_usage = with_usage
        if form == "tokens":
            self._full = {"request_id": id_, "created": created, "model": model}
            self._chunk: dict[str, Any] = {"request_id": id_}
        else:
            kind = "chat.completion" if form == "chat" else "text_completion"
            self._full = {"id": id_, "object": kind, "created": created, "model": model}
            self._chunk = {**self._full, "object": "chat.completion.chunk" if form == "chat" else kind}

    def full(self, choices: Sequence[Choice], usage: Mapping[str, Any], params: Mapping[str, Any] | None) -> bytes:
        """The whole reply.

        Args:
            choices: all, ended.
            usage: see `usage`.
            params: `kv_transfer_params`, or None.
        """
        reply = {**self._full, "choices": [self._choice(choice) for choice in choices], "usage": usage, FIELD: params}
        if self._form != "completion" and self._with_ids:
            reply["prompt_token_ids"] = choices[0].prompt_ids
        return _encode(reply)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        said: dict[str, Any] = {"text": choice.text}
        if self._form == "chat":
            said = {"message": {"role": "assistant", "content": choice.text}}
        return self._written(choice, said, choice.token_ids)

    def _written(self, choice: Choice, said: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """A choice with what is said of it; a completion's begins with its prompt, where ids are wanted."""
        written: dict[str, Any] = {"index": choice.index, "logprobs": None, **_ending(choice.finish)}
        if self._form != "tokens":
            written.update(said)
        if self._with_ids or self._form == "tokens":
            written["token_ids"] = ids
        if self._with_ids and self._form == "completion" and len(ids) == len(choice.token_ids):
            written["prompt_token_ids"] = choice.prompt_ids
        return written

    def opening(self, choice: Choice) -> bytes:
        """What a choice's part of a stream begins with; nothing for completions."""
        if self._form != "chat":
            return b""
        delta = {"role": "assistant", "content": ""}
        first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._chunk, "choices": [first], **self._so_far(choice, 0)}
        if self._with_ids:
            chunk["prompt_token_ids"] = choice.prompt_ids
        return event(chunk)

    def news(self, choice: Choice, text: str, ids: Sequence[int], params: Mapping[str, Any] | None) -> bytes:
        """What is new of a choice.

        Args:
            choice: with the news in it.
            text: new text.
            ids: new tokens.
            params: `kv_transfer_params` with the last news, or None.
        """
        said = {"delta": {"content": text}} if self._form == "chat" else {"text": text}
        new = self._written(choice, said, ids)
        chunk = {**self._chunk, "choices": [new], **self._so_far(choice, len(choice.token_ids))}
        if self._with_ids and self._form == "tokens" and len(ids) == len(choice.token_ids):
            chunk["prompt_token_ids"] = choice.prompt_ids
        if params is not None:
            chunk[FIELD] = params
        return event(chunk)

    def _so_far(self, choice: Choice, output: int) -> dict[str, Any]:
        return {"usage": _token_counts(len(choice.prompt_ids), output)} if self._with_usage else {}

    def counts(self, usage: Mapping[str, Any]) -> bytes:
        """The end of a stream whose client asked for token counts."""
        return event({**self._chunk, "choices": [], "usage": usage})


def usage(choices: Sequence[Choice], per_prompt: int, remote_cached: int | None = None) -> dict[str, Any]:
    """Token counts of a reply; each prompt counts once, however many choices it has.

    Args:
        choices: all, ended.
        per_prompt: choices of each prompt.
        remote_cached: tokens that the prefill worker found in its cache; None where there was none.  With it, what
            was found or fetched here is nobody's business.
    """
    prompt = sum(len(choice.prompt_ids) for choice in choices[::per_prompt])
    output = sum(len(choice.token_ids) for choice in choices)
    cached = remote_cached
    if cached is None:
        cached = sum(choice.finish.cached_tokens for choice in choices[::per_prompt] if choice.finish)
    return {**_token_counts(prompt, output), "prompt_tokens_details": {"cached_tokens": cached}}


def _token_counts(prompt: int, output: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _ending(finish: Finish | None) -> dict[str, Any]:
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": finish.reason, "stop_reason": finish.stop_reason}
