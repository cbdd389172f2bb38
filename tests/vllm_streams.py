"""A toy vLLM: its streams, events and texts as vLLM 0.32 makes them, from a model of 40 tokens that can be foretold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PIECES = [b" a", b"b", b" cd", b"e\xc3", b"\xa9", b"\xf0\x9f", b"\x99", b"\x82", b"", b'"', b"\n\n", b"token_ids"]
"""Bytes of the tokens, in turn: whole words, parts of characters, none at all, and what JSON must escape."""

CONTEXT = 60


def piece(token: int) -> bytes:
    return PIECES[token % len(PIECES)]


def greedy(tokens: Sequence[int]) -> int:
    """The next token after these; all of them count."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % 39


def text_of(tokens: Sequence[int]) -> str:
    """Text of an output, without the beginning of a character that lacks its end."""
    return b"".join(map(piece, tokens)).decode(errors="replace").rstrip("\ufffd")


@dataclass
class Asked:
    """What a request asks for."""

    prompt: list[int]
    max_tokens: int
    chat: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ids: bool = False
    usage: bool = False
    continuous: bool = False
    min_tokens: int = 0
    end: frozenset[int] = frozenset()
    choose: Callable[[Sequence[int]], int] = field(default=greedy)


MESSAGES = [100, 101]
"""Tokens of any chat."""


def read(body: dict[str, Any], *, chat: bool) -> Asked:
    """A request's body."""
    options = body.get("stream_options") or {}
    stop = body.get("stop") or ()
    given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids", MESSAGES) if chat else body["prompt"]
    prompt = given if isinstance(given, list) else [ord(letter) + 100 for letter in given]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return Asked(
        prompt,
        (CONTEXT - len(prompt) if chat else 16) if limit is None else limit,
        chat=chat,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=body.get("include_stop_str_in_output", False),
        ids=bool(body.get("return_token_ids")),
        usage=bool(options.get("include_usage")),
        continuous=bool(options.get("continuous_usage_stats")),
        min_tokens=body.get("min_tokens", 0),
        end=frozenset(body.get("stop_token_ids", ())),
    )


@dataclass
class Step:
    """What one token makes known."""

    token: int
    text: str
    finish: str | None = None
    stop: str | int | None = None


def steps(asked: Asked) -> Iterator[Step]:
    """One token after the other, and the text that vLLM shows with it."""
    made: list[int] = []
    held = 0 if asked.include_stop else max((len(stop) for stop in asked.stop), default=1) - 1
    shown, text = 0, ""
    while True:
        made.append(asked.choose([*asked.prompt, *made]))
        ended = made[-1] in asked.end and len(made) > asked.min_tokens
        known = len(text)
        if not ended:
            text = _decoded(asked.prompt, made, text)
        found = _stopped(text, known, asked) if len(made) > asked.min_tokens else None
        if found is not None:
            text = text[: found[0]]
        finish = "stop" if ended or found else "length" if len(made) == asked.max_tokens else None
        upto = len(text) if finish else len(text) - held
        new = text[shown:upto] if upto > shown else ""
        shown = max(shown, upto)
        yield Step(made[-1], new, finish, made[-1] if ended else found[1] if found else None)
        if finish:
            return


def _decoded(prompt: Sequence[int], made: Sequence[int], before: str) -> str:
    """All text, once it does not end within a character; the prompt's own end does not count."""
    start = len(b"".join(map(piece, prompt)).decode(errors="replace"))
    whole = b"".join(map(piece, [*prompt, *made])).decode(errors="replace")
    return before if whole.endswith("\ufffd") else whole[start:]


def _stopped(text: str, known: int, asked: Asked) -> tuple[int, str] | None:
    """Where the text is cut, and the stop string, if one ends in what is new."""
    ends = []
    for stop in asked.stop:
        at = text.find(stop, max(known - len(stop) + 1, 0))
        if at >= 0:
            ends.append((at + len(stop), at, stop))
    if not ends:
        return None
    end, at, stop = min(ends, key=lambda found: found[0])
    return (end if asked.include_stop else at), stop


def events(asked: Asked, *, id_: str = "cmpl-1", created: int = 1, together: Sequence[int] = (1,)) -> Iterator[bytes]:
    """The events of a stream, without the empty lines; of `together` tokens each, in turn."""
    base = {
        "id": id_,
        "object": "chat.completion.chunk" if asked.chat else "text_completion",
        "created": created,
        "model": "tiny",
    }
    prompt = asked.prompt if asked.ids else None

    def event(choices: list[Any], done: int | None = None, **more: Any) -> bytes:
        if asked.usage and asked.continuous and done is not None:
            more["usage"] = _usage(asked, done)
        return b"data: " + json.dumps({**base, "choices": choices, **more}, separators=(",", ":")).encode()

    if asked.chat:
        delta = {"role": "assistant", "content": ""}
        opening = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        yield event([opening], 0, prompt_token_ids=prompt)
    done, waiting, number = 0, list[Step](), 0
    for step in steps(asked):
        waiting.append(step)
        if step.finish is None and len(waiting) < together[number % len(together)]:
            continue
        done += len(waiting)
        yield event([_choice(asked, waiting, prompt if number == 0 else None)], done)
        waiting, number = [], number + 1
    if asked.usage:
        yield event([], usage=_usage(asked, done))
    yield b"data: [DONE]"


def _choice(asked: Asked, news: Sequence[Step], prompt: list[int] | None) -> dict[str, Any]:
    text = "".join(step.text for step in news)
    ids = [step.token for step in news] if asked.ids else None
    last = news[-1]
    if asked.chat:
        return {
            "index": 0,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": last.finish,
            **({"stop_reason": last.stop} if last.finish else {}),
            "token_ids": ids,
        }
    return {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": last.finish,
        "stop_reason": last.stop,
        "prompt_token_ids": prompt,
        "token_ids": ids,
    }


def _usage(asked: Asked, done: int) -> dict[str, int]:
    prompt = len(asked.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}


@dataclass
class Seen:
    """What a client has in the end."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt: list[int] | None = None
    roles: int = 0
    finishes: list[tuple[str, Any]] = field(default_factory=list)
    usage: list[Any] = field(default_factory=list)
    identities: set[str] = field(default_factory=set)
    closed: int = 0


def seen(sent: Sequence[bytes]) -> Seen:
    """What a client makes of these events."""
    result = Seen()
    for raw in sent:
        if raw == b"data: [DONE]":
            result.closed += 1
            continue
        event = json.loads(raw.removeprefix(b"data: "))
        result.identities.add(json.dumps([event["id"], event["object"], event["created"], event["model"]]))
        result.prompt = event.get("prompt_token_ids") or result.prompt
        if event.get("usage"):
            result.usage.append(event["usage"])
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            result.text += choice.get("text", "") + (delta.get("content") or "")
            result.roles += "role" in delta
            result.ids += choice.get("token_ids") or []
            result.prompt = choice.get("prompt_token_ids") or result.prompt
            if choice["finish_reason"]:
                result.finishes.append((choice["finish_reason"], choice.get("stop_reason")))
    return result
