"""Reads the bodies of OpenAI's completion and chat requests, and of vLLM's for token ids in and out.

A field that this engine would have to ignore is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from coterie.decoding import UNREADABLE
from coterie.engines.embedded.sampling import SamplingParams
from coterie.engines.embedded.transfer import FIELD, Transfer, read_transfer
from coterie.errors import RequestError

MAX_CHOICES = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's and vLLM's default; a chat goes on to the end of the context

Prompt = str | tuple[int, ...]
"""Text, or token ids."""

Messages = tuple[Mapping[str, Any], ...]
"""Of a chat; each has a role."""

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Choices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
_Prompts = str | list[int | str | list[_Size]]

_SAMPLING: dict[str, Any] = {
    "n": _Choices,
    "max_tokens": _Size,
    "min_tokens": _Size,
    "temperature": float,
    "top_p": float,
    "top_k": Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)],
    "seed": int,
    "stop": str | list[str],
    "stop_token_ids": list[_Size],
    "ignore_eos": bool,
}
_FORM: dict[str, Any] = {
    "model": str,
    "stream": bool,
    "stream_options": dict[str, bool | None],
    "return_token_ids": bool,
    FIELD: msgspec.Raw,
}
_COMPLETION = {**_FORM, **_SAMPLING, "prompt": _Prompts}
_MESSAGES = {
    "messages": list[dict[str, Any]],
    "add_generation_prompt": bool,
    "chat_template_kwargs": dict[str, Any],
}
_CHAT = {**_FORM, **_SAMPLING, **_MESSAGES, "max_completion_tokens": _Size}
_GENERATE = {
    **_FORM,
    "token_ids": Annotated[list[_Size], msgspec.Meta(min_length=1)],
    "sampling_params": msgspec.Raw,
}
_TOKENIZE = {**_MESSAGES, "model": str, "prompt": str}

_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "output_mode": ("tokens",),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_strs": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Values of fields that are not done here, but change nothing."""

_FOR_RECORDS = ("user", "metadata", "request_id")
"""Fields that never change an output; a request's id is that of its header."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Attributes:
        messages: of it.
        extra: further variables of the chat template.
        generation_prompt: whether the assistant's turn is opened at the end.
    """

    messages: Messages
    extra: Mapping[str, Any]
    generation_prompt: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A request for output, checked.

    Attributes:
        model: asked for; None for whatever there is.
        prompts: of a completion; each gets `n` choices.
        chat: the conversation; None where there is a prompt.
        tokens: whether the output is wanted as token ids, in the form of `/inference/v1/generate`.
        n: choices for each prompt.
        params: how they are chosen.
        stream: whether to answer by server-sent events.
        include_usage: whether a stream ends with the token counts.
        continuous_usage: whether each of its chunks has those so far, too.
        return_token_ids: whether token ids of prompt and output are wanted.
        transfer: what is said about KV and counts.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    chat: Chat | None
    tokens: bool
    n: int
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    transfer: Transfer = field(default_factory=Transfer)


def read_completion(body: bytes) -> Call:
    """Read a body of `/v1/completions`.

    Raises:
        RequestError: it is not a JSON object, or a field is unknown, not supported, missing or out of range.
    """
    values = _read(body, _COMPLETION)
    limit = values.get("max_tokens", COMPLETION_MAX_TOKENS)
    return _call(values, limit, prompts=_prompts(_required(values, "prompt")))


def read_chat(body: bytes) -> Call:
    """Read a body of `/v1/chat/completions`.

    Raises:
        RequestError: as `read_completion`.
    """
    values = _read(body, _CHAT)
    return _call(values, values.get("max_completion_tokens", values.get("max_tokens")), chat=_chat(values))


def read_generate(body: bytes) -> Call:
    """Read a body of `/inference/v1/generate`.

    Raises:
        RequestError: as `read_completion`.
    """
    values = _read(body, _GENERATE)
    sampling = _read(_required(values, "sampling_params"), _SAMPLING, "sampling_params")
    prompt = tuple(_required(values, "token_ids"))
    return _call({**values, **sampling}, sampling.get("max_tokens"), prompts=(prompt,), tokens=True)


def read_tokenize(body: bytes) -> tuple[str | None, str | Chat]:
    """Read a body of `/tokenize`: the model, and a prompt or a conversation.

    Raises:
        RequestError: as `read_completion`.
    """
    values = _read(body, _TOKENIZE)
    if "messages" in values:
        return values.get("model"), _chat(values)
    return values.get("model"), _required(values, "prompt")


def _call(
    values: dict[str, Any],
    limit: int | None,
    *,
    prompts: tuple[Prompt, ...] = (),
    chat: Chat | None = None,
    tokens: bool = False,
) -> Call:
    options = values.get("stream_options", {})
    if unknown := {name for name, wanted in options.items() if wanted} - {"include_usage", "continuous_usage_stats"}:
        raise RequestError(f"stream_options: {', '.join(sorted(unknown))} is not supported", "stream_options")
    if options and not values.get("stream"):
        raise RequestError("stream_options: only allowed with stream", "stream_options")
    call = Call(
        model=values.get("model"),
        prompts=prompts,
        chat=chat,
        tokens=tokens,
        n=values.get("n", 1),
        params=_params(values, limit),
        stream=values.get("stream", False),
        include_usage=bool(options.get("include_usage")),
        # vLLM takes the second without the first, and gives neither
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        return_token_ids=values.get("return_token_ids", False),
        transfer=read_transfer(values[FIELD]) if FIELD in values else Transfer(),
    )
    _check_choices(call)
    return call


def _check_choices(call: Call) -> None:
    choices = call.n * max(len(call.prompts), 1)
    if choices > MAX_CHOICES:
        raise RequestError(f"n: {choices} choices in one request; at most {MAX_CHOICES}", "n")
    transfer = call.transfer
    if choices > 1 and (transfer.keep or transfer.remote or transfer.prompt_ids):
        raise RequestError(f"{FIELD}: KV is handed over for one prompt and one choice, not for {choices}", FIELD)


def _params(values: dict[str, Any], limit: int | None) -> SamplingParams:
    stop = values.get("stop", ())
    return SamplingParams(
        max_tokens=limit,
        min_tokens=values.get("min_tokens", 0),
        temperature=values.get("temperature", 1.0),
        top_p=values.get("top_p", 1.0),
        top_k=max(values.get("top_k", 0), 0),  # vLLM's -1 also means all
        seed=values.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(values.get("stop_token_ids", ())),
        ignore_eos=values.get("ignore_eos", False),
    )


# --- fields ----------------------------------------------------------------------------------------------


def _read(body: bytes | msgspec.Raw, types: Mapping[str, Any], name: str = "the body") -> dict[str, Any]:
    """The fields that say something."""
    try:
        fields = _object.decode(body)
    except UNREADABLE as error:
        raise RequestError(f"{name} must be a JSON object: {error}") from None
    values = {}
    for name, raw in fields.items():
        if bytes(raw) == b"null" or name in _FOR_RECORDS:
            continue
        if name in types:
            values[name] = _decode(name, raw, types[name])
        else:
            _check_asks_nothing(name, raw)
    return values


def _decode(name: str, raw: msgspec.Raw, type_: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=type_)
    except UNREADABLE as error:
        raise RequestError(f"{name}: {error}", name) from None


def _check_asks_nothing(name: str, raw: msgspec.Raw) -> None:
    if name not in _ASKS_NOTHING:
        raise RequestError(f"{name[:60]}: this engine does not know this field", name[:60])
    value = _decode(name, raw, Any)
    if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in _ASKS_NOTHING[name]):
        allowed = " or ".join(msgspec.json.encode(value).decode() for value in _ASKS_NOTHING[name])
        raise RequestError(f"{name}: not supported by this engine; leave it out, or send {allowed}", name)


def _required(values: dict[str, Any], name: str) -> Any:
    if name not in values:
        raise RequestError(f"{name}: is missing", name)
    return values[name]


def _prompts(value: str | list[Any]) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    kinds = {type(item) for item in value}
    if kinds == {int}:
        if min(value) < 0:
            raise RequestError("prompt: token ids must not be negative", "prompt")
        return (tuple(value),)
    if len(kinds) != 1:
        raise RequestError("prompt: must be a text, token ids, or a list of either, and not empty", "prompt")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _chat(values: dict[str, Any]) -> Chat:
    messages = _messages(_required(values, "messages"))
    return Chat(messages, values.get("chat_template_kwargs", {}), values.get("add_generation_prompt", True))


def _messages(value: list[dict[str, Any]]) -> Messages:
    """Role and content are for the chat template to judge."""
    if not value:
        raise RequestError("messages: must not be empty", "messages")
    for number, message in enumerate(value):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages: message {number}: role must be a text", "messages")
    return tuple(value)
