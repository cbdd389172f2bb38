"""A prefill server's reply as the client's answer, where the first token ended the output.

vLLM answers the prefill leg as one JSON object.  A client that asked for a stream gets the events that vLLM
would have sent: of a chat the role, then the output with its end, then the token counts if they were asked for.
"""

from __future__ import annotations

import msgspec

from coterie.decoding import UNREADABLE
from coterie.engines.base import Answer, Call, Fields
from coterie.errors import EngineError, RequestError

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_NULL = msgspec.Raw(b"null")
_NONE = msgspec.Raw(b"[]")
_ENVELOPE = ("id", "object", "created", "model")
_TOKENS_ENVELOPE = ("request_id", "output_mode")
_WITH_THE_FIRST = ("prompt_token_ids", "mm_placeholders")
_WITH_THE_LAST = "system_fingerprint"
_ALWAYS = ("logprobs", "finish_reason", "stop_reason")
"""What events of completions and chats hold even where it is null; those of token ids hold all."""

_encode = msgspec.json.Encoder().encode


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


_fields = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_usage = msgspec.json.Decoder(_Usage)
_stream_options = msgspec.json.Decoder(_StreamOptions | None)


def answer(call: Call, reply: bytes) -> Answer:
    """See `Engine.answer`.

    Raises:
        RequestError: `stream_options` cannot be read.
        EngineError: the reply is not one choice with its token counts.
    """
    options = _read_options(call)
    try:
        fields = _fields.decode(reply)
        if not call.stream:
            return Answer(_JSON, _encode({**fields, "kv_transfer_params": _NULL}))
        return Answer(_EVENTS, b"".join(map(_event, _chunks(call.path, fields, options))) + _DONE)
    except (*UNREADABLE, KeyError, ValueError) as error:
        raise EngineError(f"the prefill reply is not an answer: {error!r}") from None


def _read_options(call: Call) -> _StreamOptions:
    try:
        return _stream_options.decode(call.fields.get("stream_options", b"null")) or _StreamOptions()
    except UNREADABLE as error:
        raise RequestError(f"stream_options: {error}", "stream_options") from None


def _chunks(path: str, reply: Fields, options: _StreamOptions) -> list[Fields]:
    (choice,) = _choices.decode(reply["choices"])
    reply = _said(reply)
    shared = _TOKENS_ENVELOPE if path == GENERATE else _ENVELOPE
    envelope = {name: reply[name] for name in shared if name in reply}
    if path == CHAT:
        envelope["object"] = msgspec.Raw(b'"chat.completion.chunk"')
        chunks = [{**envelope, "choices": _opening(choice)}, {**envelope, "choices": _one(_delta(choice))}]
    elif path == GENERATE:
        chunks = [{**envelope, "choices": _one(choice)}]
    else:
        chunks = [{**envelope, "choices": _one(_output(choice))}]
    chunks[0].update({name: reply[name] for name in _WITH_THE_FIRST if name in reply})
    if options.include_usage:
        chunks = _with_usage(chunks, envelope, reply, options)
    if _WITH_THE_LAST in reply:
        chunks[-1][_WITH_THE_LAST] = reply[_WITH_THE_LAST]
    return chunks


def _said(fields: Fields) -> Fields:
    """The fields that are not null."""
    return {name: raw for name, raw in fields.items() if raw != _NULL}


def _opening(choice: Fields) -> msgspec.Raw:
    message = _fields.decode(choice["message"])
    delta = {"role": message["role"], "content": ""}
    return _one({"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None})


def _output(choice: Fields) -> Fields:
    return {name: raw for name, raw in choice.items() if raw != _NULL or name in _ALWAYS}


def _delta(choice: Fields) -> Fields:
    """The output of a chat: what is said in `message`, but for the role, is said in `delta`."""
    output = _output(choice)
    message = _fields.decode(output.pop("message"))
    said = {name: raw for name, raw in _said(message).items() if name != "role" and raw != _NONE}
    if "tool_calls" in said:
        calls = _choices.decode(said["tool_calls"])
        said["tool_calls"] = _raw([{"index": number, **call} for number, call in enumerate(calls)])
    return {"index": output.pop("index"), "delta": _raw(said), **output}


def _with_usage(chunks: list[Fields], envelope: Fields, reply: Fields, options: _StreamOptions) -> list[Fields]:
    if options.continuous_usage_stats:
        usage = _usage.decode(reply["usage"])
        for number, chunk in enumerate(chunks):
            output = usage.completion_tokens if number == len(chunks) - 1 else 0
            chunk["usage"] = _raw(_so_far(usage.prompt_tokens, output))
    total = _raw(_said(_fields.decode(reply["usage"])))
    return [*chunks, {**envelope, "choices": _NONE, "usage": total}]


def _so_far(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _one(choice: object) -> msgspec.Raw:
    return _raw([choice])


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def _event(chunk: Fields) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)
