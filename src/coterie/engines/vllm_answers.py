"""A prefill server's reply as the client's answer, where the first token ended the output.

vLLM answers the prefill leg as one JSON object.  A client that asked for a stream gets the events that vLLM
would have sent: of a chat the role, then the output with its end, then the token counts if they were asked for.
"""

from __future__ import annotations

import msgspec

from coterie.engines.base import Answer, Call, Fields
from coterie.errors import EngineError, RequestError

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_DONE = b"data: [DONE]\n\n"
_NULL = msgspec.Raw(b"null")
_NO_CHOICES = msgspec.Raw(b"[]")
_ENVELOPE = ("id", "request_id", "object", "created", "model", "system_fingerprint")
_ALWAYS = ("logprobs", "finish_reason", "stop_reason")
"""What vLLM's events hold even where it is null."""

_NOT_STREAMED = ("prompt_logprobs",)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
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
    except (*_UNREADABLE, KeyError, ValueError) as error:
        raise EngineError(f"the prefill reply is not an answer: {error!r}") from None


def _read_options(call: Call) -> _StreamOptions:
    try:
        return _stream_options.decode(call.fields.get("stream_options", b"null")) or _StreamOptions()
    except _UNREADABLE as error:
        raise RequestError(f"stream_options: {error}", "stream_options") from None


def _chunks(path: str, reply: Fields, options: _StreamOptions) -> list[Fields]:
    (choice,) = _choices.decode(reply["choices"])
    envelope = {name: reply[name] for name in _ENVELOPE if reply.get(name, _NULL) != _NULL}
    output = {name: raw for name, raw in choice.items() if raw != _NULL or name in _ALWAYS}
    for name in _NOT_STREAMED:
        output.pop(name, None)
    if path == CHAT:
        envelope["object"] = msgspec.Raw(b'"chat.completion.chunk"')
        chunks = [{**envelope, "choices": _opening(choice)}, {**envelope, "choices": _one(_delta(output))}]
    else:
        chunks = [{**envelope, "choices": _one(output)}]
    if reply.get("prompt_token_ids", _NULL) != _NULL:
        chunks[0]["prompt_token_ids"] = reply["prompt_token_ids"]
    return _with_usage(chunks, envelope, reply, options)


def _opening(choice: Fields) -> msgspec.Raw:
    message = _fields.decode(choice["message"])
    delta = {"role": message["role"], "content": ""}
    return _one({"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None})


def _delta(output: Fields) -> Fields:
    """The output of a chat: what is said in `message`, but for the role, is said in `delta`."""
    message = _fields.decode(output.pop("message"))
    said = {name: raw for name, raw in message.items() if name != "role" and raw not in (_NULL, _NO_CHOICES)}
    if "tool_calls" in said:
        calls = _choices.decode(said["tool_calls"])
        said["tool_calls"] = _raw([{"index": number, **call} for number, call in enumerate(calls)])
    return {"index": output.pop("index"), "delta": _raw(said), **output}


def _with_usage(chunks: list[Fields], envelope: Fields, reply: Fields, options: _StreamOptions) -> list[Fields]:
    if not options.include_usage:
        return chunks
    if options.continuous_usage_stats:
        total = _usage.decode(reply["usage"])
        for number, chunk in enumerate(chunks):
            output = total.completion_tokens if number == len(chunks) - 1 else 0
            chunk["usage"] = _raw(_so_far(total.prompt_tokens, output))
    return [*chunks, {**envelope, "choices": _NO_CHOICES, "usage": reply["usage"]}]


def _so_far(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _one(choice: object) -> msgspec.Raw:
    return _raw([choice])


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


def _event(chunk: Fields) -> bytes:
    return b"data: %b\n\n" % _encode(chunk)
