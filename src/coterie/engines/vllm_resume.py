"""How a stream of vLLM's goes on at another worker where a lost one stopped.

Every event says which tokens it adds (`return_token_ids`).  They are kept; after a loss the prompt's tokens and those
before the *mark* are the prompt of both legs at other workers, and the rest is generated again.

```
prompt | output of the lost worker          |
       | kept                | given again  | new
       0                   mark            sent
```

The mark is the last token up to which all text is out: vLLM shows no part of a character, and with stop strings holds
back as many characters as may turn out to begin one.  What is given again is not sent again; where text of it is out
already, or the client was shown its tokens, it must be the same tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any

import msgspec
from msgspec.structs import replace

from coterie.decoding import UNREADABLE
from coterie.engines.base import Call, Fields
from coterie.engines.vllm_events import DATA, DONE, IDS_KEY, PROMPT_IDS_KEY, Alike, Choice, hide, listed, read_event
from coterie.errors import EngineError, UnresumableError

PARAMS = "kv_transfer_params"
PROMPT_IDS = "prompt_token_ids"

COMPLETION_TOKENS = 16
"""vLLM's limit for a completion that sets none; a chat may fill the context."""

_GREEDY_BELOW = 1e-5  # vLLM's `_SAMPLING_EPS`

_RESUMABLE = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "cache_salt", "chat_template",
        "chat_template_kwargs", "continue_final_message", "ignore_eos", "include_stop_str_in_output", "logit_bias",
        "max_completion_tokens", "max_tokens", "messages", "metadata", "min_p", "min_tokens", "model",
        "parallel_tool_calls", "priority", "prompt", "request_id", "return_token_ids", "seed", "service_tier",
        "session_id", "skip_special_tokens", "stop", "stop_token_ids", "store", "stream", "stream_interval",
        "stream_options", "temperature", "top_k", "top_p", "user",
    }
)  # fmt: skip
"""Fields that mean the same for the rest of an output as for the whole, or are reduced by what was sent."""

_NEUTRAL = {
    "best_of": (b"1",),
    "bad_words": (b"[]",),
    "echo": (b"false",),
    "frequency_penalty": (b"0", b"0.0"),
    "include_reasoning": (b"true",),
    "length_penalty": (b"1", b"1.0"),
    "logprobs": (b"false",),
    "n": (b"1",),
    "presence_penalty": (b"0", b"0.0"),
    "repetition_penalty": (b"1", b"1.0"),
    "spaces_between_special_tokens": (b"true",),
    "tool_choice": (b'"none"', b'"auto"'),
    "tools": (b"[]",),
    "top_logprobs": (b"0",),
    "use_beam_search": (b"false",),
}
"""Values of other fields that ask for nothing, as they are commonly written."""

_OBJECT = DATA + b"{"
_IDENTITY = ("id", "object", "created", "model")
_TRUE, _NULL = msgspec.Raw(b"true"), msgspec.Raw(b"null")
_GIVEN_UP = ("abort", "error")
"""Finish reasons of a server that stops before the output is complete."""


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, int | None] | None = None


class _Part(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_read_object = msgspec.json.Decoder(Fields).decode
_read_objects = msgspec.json.Decoder(list[Fields]).decode
_read_usage = msgspec.json.Decoder(_Usage).decode
_read_stop = msgspec.json.Decoder(str | list[str] | None).decode
_read_number = msgspec.json.Decoder(float | None).decode
_read_int = msgspec.json.Decoder(int | None).decode
_read_ids = msgspec.json.Decoder(list[int]).decode
_read_messages = msgspec.json.Decoder(list[_Message]).decode
_encode = msgspec.json.Encoder().encode


def why_unresumable(call: Call, *, sampled: bool) -> str | None:
    """Why a call's stream could not go on at another worker; None if it could.

    Args:
        call: the client's request.
        sampled: whether a stream with a temperature may go on, though with other tokens than the lost worker's.
    """
    if call.undividable is not None:
        return f"the request has {call.undividable}"
    for name in call.fields.keys() - _RESUMABLE:
        raw = bytes(call.fields[name])
        if raw != b"null" and raw not in _NEUTRAL.get(name, ()):
            return f"the request sets {name[:60]}"
    if not sampled and not _greedy(call.fields):
        return "the request is sampled, and sampled streams end by the gateway's configuration"
    try:
        _stop_length(call.fields)
    except UNREADABLE:
        return "the request's stop is neither text nor texts"
    return None


class _Marks:
    """Where another worker could go on: after tokens whose text is out.

    vLLM shows no part of a character, so a token that showed text left nothing behind.  A stop string may begin up to
    `reach` characters before the break, so at least these are made again.

    Args:
        fields: the request's.
    """

    __slots__ = ("_chars", "_held", "_reach", "_shown", "_tokens")

    def __init__(self, fields: Fields) -> None:
        self._reach = max(_stop_length(fields) - 1, 0)
        self._held = 0 if _is(fields, "include_stop_str_in_output", b"true") else self._reach
        self._chars = 0  # that were shown
        self._shown = array("Q", [0])  # the same, after each event that showed any
        self._tokens = array("I", [0])  # that had come by then

    def add(self, tokens: int, text: str, sure: bool) -> None:
        """After so many tokens this text was shown; it is that of all of them if `sure`."""
        self._chars += len(text)
        if not sure:
            return
        if self._reach:
            self._shown.append(self._chars)
            self._tokens.append(tokens)
        else:
            self.move(tokens)

    def move(self, tokens: int) -> None:
        """After so many tokens all text is out; without stop strings only."""
        self._shown[0], self._tokens[0] = self._chars, tokens

    def is_at(self, tokens: int) -> bool:
        """Whether the mark is after so many tokens, and without stop strings."""
        return self._tokens[0] == tokens > 0

    def last(self) -> tuple[int, int | None]:
        """Tokens before the mark, and how many characters a worker that goes on from there shows again.

        The latter is None where no text is out beyond the mark, so that all that comes is new.
        """
        place = bisect_right(self._shown, max(self._chars - self._reach, 0)) - 1
        mark, out = self._tokens[place], self._chars - self._shown[place]
        return mark, (out - self._held if mark else out) if out else None


class VllmTranscript:
    """What of one stream has come; see `Transcript`, and the module for how it goes on.

    Args:
        call: the client's request, which `why_unresumable` has nothing against.
        limit_tokens: most tokens of the prompt, and of the output, to be ready to go on with.
        chat: whether it is a chat.
    """

    __slots__ = (
        "_again", "_alike", "_asked_ids", "_chat", "_greedy", "_identity", "_ids", "_limit", "_marks", "_moved",
        "_problem", "_prompt", "_resumed", "_role_sent", "_skip", "_usage_sent", "_whole", "call", "closed", "finished",
    )  # fmt: skip

    def __init__(self, call: Call, limit_tokens: int, *, chat: bool) -> None:
        self.call = self._whole = replace(call, fields={**call.fields, "return_token_ids": _TRUE})
        self.finished = False
        self.closed = False
        self._limit = limit_tokens
        self._chat = chat
        self._asked_ids = _is(call.fields, "return_token_ids", b"true")
        self._greedy = _greedy(call.fields)
        self._problem: str | None = None
        self._identity: Fields | None = None  # what every event of the reply says: id, created, ...
        self._prompt = b""  # its token ids in JSON, as they will be sent
        self._ids = array("I")  # of the output
        self._marks = _Marks(call.fields)
        self._alike: Alike | None = None
        self._role_sent = False
        self._usage_sent = False
        # Of the worker that goes on:
        self._resumed = False
        self._moved = 0  # tokens of the output that are part of its prompt
        self._again = array("I")  # tokens that the client has, and this worker has yet to give again
        self._skip: int | None = None  # characters to come that the client has; None for none

    @property
    def complete(self) -> bool:
        """Whether no token is missing; see `Transcript`."""
        left = self._left(len(self._ids))
        return self.finished or (left is not None and left <= 0 and self._marks.last()[0] == len(self._ids))

    def add(self, event: bytes) -> bytes:
        """Take in an event; see `Transcript.add`."""
        alike = None if self._alike is None else self._alike.read(event)
        if alike is not None:
            token, hidden = alike
            self._ids.append(token)
            self._marks.move(len(self._ids))
            if len(self._ids) > self._limit:
                self._give_up(f"its output has over {self._limit} tokens")
            return event if self._asked_ids else hidden
        if not event.startswith(_OBJECT):
            self.closed = self.closed or event == DONE
            return event
        try:
            if self._resumed:
                return self._splice(event)
            if self._identity is None:
                return self._open(event)
            choice = self._read(event)
        except UNREADABLE as error:
            raise EngineError(f"its stream holds an event that cannot be read: {error}") from None
        if choice is not None and self._problem is None:
            self._note(choice)
            if self._alike is None and self._marks.is_at(len(self._ids)):
                self._alike = Alike.like(event, choice)
        return event if self._asked_ids else hide(event, IDS_KEY)

    # --- what comes ---

    def _read(self, event: bytes) -> Choice | None:
        """The event's choice; None if it has none, or is of a kind that nobody could go on with."""
        try:
            read = read_event(event[6:])  # behind `DATA`
        except msgspec.ValidationError:
            if self._resumed:
                raise
            self._give_up("its events hold more than text")
            return None
        if self._problem is None and read.error:
            raise EngineError("its stream ends with an error event")  # whose words may quote the request
        if not read.choices:
            self._usage_sent = True
            return None
        if self._problem is None and read.choices[0].finish_reason in _GIVEN_UP:
            raise EngineError("it gave the request up")
        return read.choices[0]

    def _open(self, event: bytes) -> bytes:
        """The first event says whose reply it is, and which tokens the prompt has: so many that they are not parsed."""
        prompt, short = listed(event, PROMPT_IDS_KEY), hide(event, PROMPT_IDS_KEY)
        choice = self._read(short)
        fields = _read_object(short[len(DATA) :])
        self._identity = {name: fields[name].copy() for name in _IDENTITY if name in fields}
        if prompt is None:
            self._give_up("its worker does not name tokens")
        elif prompt.count(b",") >= self._limit:
            self._give_up(f"its prompt has over {self._limit} tokens")
        else:
            self._prompt = prompt
        if choice is not None and self._problem is None:
            self._note(choice)
        return event if self._asked_ids else hide(short, IDS_KEY)

    def _note(self, choice: Choice) -> None:
        ids, new, delta = self._ids, choice.token_ids, choice.delta
        if new:
            ids.extend(new)
            if len(ids) > self._limit:
                self._give_up(f"its output has over {self._limit} tokens")
                return
        if delta is not None and delta.role is not None:
            self._role_sent = True
        if text := choice.text if delta is None else delta.content:
            # Behind a text that several tokens made, the beginning of a character may be waiting for its end.
            self._marks.add(len(ids), text, new is not None and len(new) == 1)
        if choice.finish_reason is not None:
            self.finished = True

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        self._prompt = b""
        self._alike = None
        del self._ids[:]

    # --- going on ---

    def resume(self) -> Call:
        """The call to go on with; see `Transcript.resume`."""
        if self._problem is not None:
            raise UnresumableError(self._problem)
        if self._identity is None:
            return self.call
        if self._chat and not _only_text(self._whole.prompt):
            raise UnresumableError("its messages hold more than text")
        if not _are_ids(self._prompt):
            raise UnresumableError("its worker named what are no tokens")
        self._ids += self._again
        mark, skip = self._marks.last()
        again = self._ids[mark:] if self._asked_ids or skip is not None else array("I")
        if again and not self._greedy:
            raise UnresumableError("it is sampled, and what was sent of it does not end with a token")
        self._resumed, self._moved, self._skip, self._alike = True, mark, skip, None
        self._ids, self._again = self._ids[:mark], again
        self.call = self._rest(mark)
        return self.call

    def _left(self, sent: int) -> int | None:
        """Tokens that the output may have after the first `sent`; None without a limit."""
        limit = self._whole.output_tokens
        if limit is None and not self._chat and "max_tokens" not in self._whole.fields:
            limit = COMPLETION_TOKENS
        return None if limit is None else limit - sent

    def _rest(self, mark: int) -> Call:
        """The call for what comes after the mark."""
        fields = self._whole.fields.copy()
        ids = self._prompt[:-1] + b"," + _encode(self._ids[:mark].tolist())[1:] if mark else self._prompt
        if self._chat:
            fields[PARAMS] = msgspec.Raw(_encode({PROMPT_IDS: msgspec.Raw(ids)}))
        else:
            fields["prompt"] = msgspec.Raw(ids)
            fields.setdefault("max_tokens", msgspec.Raw(b"%d" % COMPLETION_TOKENS))
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            value = _read_int(fields.get(name, _NULL))
            if value is not None:
                fields[name] = msgspec.Raw(b"%d" % max(value - mark, 0))
        return replace(self._whole, fields=fields, output_tokens=self._left(mark))

    def closing(self) -> list[bytes]:
        """What is missing behind the last token; see `Transcript.closing`."""
        events = []
        if not self.finished:
            events.append(self._event([_last_choice(chat=self._chat)]))
        if self._include_usage() and not self._usage_sent:
            prompt, output = self._prompt.count(b",") + 1, len(self._ids)
            usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
            events.append(self._event([], usage=usage))
        return events if self.closed else [*events, DONE]

    def _include_usage(self) -> bool:
        options = msgspec.json.decode(self._whole.fields.get("stream_options", _NULL))
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return DATA + _encode({**(self._identity or {}), "choices": choices, **more})

    # --- what comes of the worker that goes on ---

    def _splice(self, event: bytes) -> bytes:
        """The event as the first worker would have sent it; nothing where the client has it already."""
        prompt = listed(event, PROMPT_IDS_KEY)
        if prompt is not None and prompt.count(b",") != self._prompt.count(b",") + self._moved:
            # A server that went on from something else, such as the messages alone, would begin anew.
            raise EngineError("it did not go on from the tokens that it was given")
        event = hide(event, PROMPT_IDS_KEY)
        choice = self._read(event)
        if choice is not None and not self._advance(choice):
            return b""
        assert self._identity is not None
        fields = {**_read_object(event[len(DATA) :]), **self._identity}
        if not _is(fields, "usage", b"null"):
            fields["usage"] = self._usage_of_all(fields["usage"])
        if choice is not None:
            fields["choices"] = msgspec.Raw(_encode([self._edited(fields["choices"], choice)]))
        return DATA + _encode(fields)

    def _advance(self, choice: Choice) -> bool:
        """Follow the worker, and take from the choice what the client has; return whether anything is left."""
        opening = choice.delta is not None and choice.delta.role is not None
        if opening and self._role_sent:
            assert choice.delta is not None
            choice.delta.role = None
        repeated = self._repeat(choice) if self._again else False
        self._note(choice)
        if opening or repeated:
            return bool(choice.token_ids or choice.shown or choice.finish_reason) or not self._role_sent
        return True

    def _repeat(self, choice: Choice) -> bool:
        """Take from the choice the tokens that the client has, and their text; return whether there are any."""
        given = choice.token_ids or []
        again = self._again[: len(given)]
        if again.tolist() != given[: len(again)]:
            raise EngineError("it chose other tokens than those that were sent already")
        self._ids += again
        del self._again[: len(again)]
        choice.token_ids = given[len(again) :]
        if self._skip is not None and again:
            # The text of old tokens alone is old.  Of that which old and new ones share, the length tells.
            text = choice.shown
            choice.show(text[max(self._skip, 0) :] if choice.token_ids else "")
            self._skip -= len(text)
        return bool(again)

    def _edited(self, choices: msgspec.Raw, choice: Choice) -> Fields:
        fields = _read_objects(choices)[0]
        if "token_ids" in fields:
            fields["token_ids"] = msgspec.Raw(_encode(choice.token_ids)) if self._asked_ids else _NULL
        if choice.text is not None:
            fields["text"] = msgspec.Raw(_encode(choice.text))
        elif choice.delta is not None:
            fields["delta"] = msgspec.Raw(_encode(choice.delta))
        return fields

    def _usage_of_all(self, usage: msgspec.Raw) -> msgspec.Raw:
        """With those tokens counted as output that were in this worker's prompt; the sum is right as it is."""
        read = _read_usage(usage)
        prompt = read.prompt_tokens - self._moved
        counted: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": read.completion_tokens + self._moved}
        details = read.prompt_tokens_details
        if details is not None and (details.get("cached_tokens") or 0) > prompt:
            counted["prompt_tokens_details"] = {**details, "cached_tokens": prompt}
        return msgspec.Raw(_encode({**_read_object(usage), **counted}))


# --- fields of requests, bytes of events -------------------------------------------------------------


def _is(fields: Fields, name: str, value: bytes) -> bool:
    """Whether a field has this value; one that is missing is null."""
    return bytes(fields.get(name, _NULL)) == value


def _greedy(fields: Fields) -> bool:
    try:
        temperature = _read_number(fields.get("temperature", _NULL))
    except UNREADABLE:
        return False
    return temperature is not None and temperature < _GREEDY_BELOW


def _stop_length(fields: Fields) -> int:
    """Characters of the longest stop string; 0 without any."""
    stop = _read_stop(fields.get("stop", _NULL)) or ()
    return max(map(len, (stop,) if isinstance(stop, str) else stop), default=0)


def _only_text(messages: bytes) -> bool:
    try:
        read = _read_messages(messages)
    except UNREADABLE:
        return False
    parts = (part for message in read if isinstance(message.content, list) for part in message.content)
    return all(part.type == "text" for part in parts)


def _are_ids(raw: bytes) -> bool:
    try:
        _read_ids(raw)
    except UNREADABLE:
        return False
    return True


def _last_choice(*, chat: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"delta": {"content": ""}} if chat else {"text": ""}
    return {"index": 0, **text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
