"""A prefill server's reply in the form that the client asked for; expected events as vLLM 0.32 writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coterie.engines.base import Answer
from coterie.engines.vllm_nixl import CHAT, COMPLETIONS, GENERATE, VllmNixl
from coterie.errors import EngineError, RequestError

engine = VllmNixl()
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
ENDED: dict[str, Any] = {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
OPENAI = {"id": "x-1", "created": 5, "model": "m", "usage": USAGE, "kv_transfer_params": {"a": 1}}
COMPLETION = {
    **OPENAI,
    "object": "text_completion",
    "choices": [{"index": 0, "text": "", **ENDED, "token_ids": None, "prompt_logprobs": None}],
}
MESSAGE = {"role": "assistant", "content": "", "refusal": None, "tool_calls": []}
TALK = {**OPENAI, "object": "chat.completion", "choices": [{"index": 0, "message": MESSAGE, **ENDED}]}
TOKENS = {
    "request_id": "g-1",
    "output_mode": "tokens",
    "created": 5,
    "choices": [{"index": 0, "token_ids": [7], **ENDED, "sampling_mask": None}],
    "usage": USAGE,
    "prompt_token_ids": [1, 2, 3],
}


def answered(path: str, reply: object, **fields: object) -> Answer:
    body = {"sampling_params": {}, **fields} if path == GENERATE else fields
    return engine.answer(engine.parse(path, json.dumps(body).encode()), json.dumps(reply).encode())


def events(answer: Answer) -> list[Any]:
    assert answer.content_type == b"text/event-stream; charset=utf-8"
    *data, done, nothing = answer.body.decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


@pytest.mark.parametrize(("path", "reply"), [(COMPLETIONS, COMPLETION), (CHAT, TALK), (GENERATE, TOKENS)])
def test_a_whole_answer_is_the_reply_without_its_handoff(path: str, reply: dict[str, Any]) -> None:
    answer = answered(path, reply)
    assert answer.content_type == b"application/json"
    assert json.loads(answer.body) == {**reply, "kv_transfer_params": None}


def test_a_streamed_completion_is_one_event_and_the_end() -> None:
    (chunk,) = events(answered(COMPLETIONS, COMPLETION, stream=True))
    envelope = {"id": "x-1", "object": "text_completion", "created": 5, "model": "m"}
    assert chunk == {**envelope, "choices": [{"index": 0, "text": "", **ENDED}]}


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_usage_that_was_asked_for() -> None:
    chunks = events(answered(CHAT, TALK, stream=True, stream_options={"include_usage": True}))
    envelope = {"id": "x-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert chunks == [
        {**envelope, "choices": [role]},
        {**envelope, "choices": [{"index": 0, "delta": {"content": ""}, **ENDED}]},
        {**envelope, "choices": [], "usage": USAGE},
    ]


def test_a_streamed_chat_tells_everything_that_its_message_said() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    choice = {"index": 0, "message": message, **ENDED, "token_ids": [4]}
    chunks = events(answered(CHAT, {**TALK, "choices": [choice], "prompt_token_ids": [1]}, stream=True))
    assert chunks[0]["prompt_token_ids"] == [1]
    delta = {"reasoning": "hm", "tool_calls": [{"index": 0, **call}]}
    assert chunks[1]["choices"] == [{"index": 0, "delta": delta, **ENDED, "token_ids": [4]}]


def test_the_fingerprint_of_the_server_comes_with_the_last_event_and_nulls_of_the_usage_do_not_come() -> None:
    reply = {**TALK, "system_fingerprint": "f", "usage": {**USAGE, "completion_tokens_details": None}}
    for options, last in (({}, 1), ({"stream_options": {"include_usage": True}}, 2)):
        chunks = events(answered(CHAT, reply, stream=True, **options))
        assert [chunk.get("system_fingerprint") for chunk in chunks] == [None] * last + ["f"]
    assert chunks[-1]["usage"] == USAGE


def test_usage_that_is_wanted_all_the_time_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(answered(CHAT, TALK, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 1]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [3, 4, 4]


def test_streamed_token_ids_keep_vllm_s_own_form() -> None:
    chunks = events(answered(GENERATE, TOKENS, stream=True, stream_options={"include_usage": True}))
    assert chunks == [
        {
            "request_id": "g-1",
            "output_mode": "tokens",
            "choices": [{"index": 0, "token_ids": [7], **ENDED, "sampling_mask": None}],
            "prompt_token_ids": [1, 2, 3],
        },
        {"request_id": "g-1", "output_mode": "tokens", "choices": [], "usage": USAGE},
    ]


@pytest.mark.parametrize("options", [3, "x", {"include_usage": 1}])
def test_stream_options_that_cannot_be_read_are_the_client_s_mistake(options: object) -> None:
    with pytest.raises(RequestError, match="stream_options"):
        answered(CHAT, TALK, stream=True, stream_options=options)


@pytest.mark.parametrize(
    "reply",
    [{}, [], {**TALK, "choices": []}, {**TALK, "choices": TALK["choices"] * 2}, {**TALK, "choices": [{"index": 0}]}],
)
def test_a_reply_that_is_no_answer_is_an_engine_error(reply: object) -> None:
    with pytest.raises(EngineError, match="not an answer"):
        answered(CHAT, reply, stream=True)
