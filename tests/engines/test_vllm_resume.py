"""A stream that breaks anywhere ends as if it had not, for every kind of request that may go on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.engines.base import Call, Transcript
from coterie.engines.vllm_nixl import CHAT, COMPLETIONS, VllmNixl
from coterie.errors import EngineError, UnresumableError
from vllm_streams import Asked, events, greedy, read, seen, steps, text_of

engine = VllmNixl()
LIMIT = 1 << 20


def call_of(body: dict[str, Any], *, chat: bool) -> Call:
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [5, 6, 7]}
    filled = {"model": "tiny", "stream": True, "temperature": 0, **content, **body}
    return engine.parse(CHAT if chat else COMPLETIONS, json.dumps(filled).encode())


def asked_by(call: Call) -> Asked:
    """What the decode worker makes of its request."""
    handoff = engine.handoff(b'{"usage":{"prompt_tokens":1},"kv_transfer_params":{"remote_host":"x"}}')
    return read(json.loads(engine.decode_body(call, handoff)), chat=call.path == CHAT)


def play(
    call: Call, breaks: Sequence[int], together: Sequence[Sequence[int]] = ((1,),)
) -> tuple[list[bytes], Transcript]:
    """What a client is sent where the workers break after so many events each, and the last does not."""
    transcript = engine.transcript(call, LIMIT)
    sent: list[bytes] = []
    call = transcript.call
    for leg, ends in enumerate([*breaks, None]):
        made = events(asked_by(call), id_=f"id-{leg}", created=leg, together=together[leg % len(together)])
        sent += [out for event in itertools.islice(made, ends) if (out := transcript.add(event))]
        if transcript.closed:
            break
        if transcript.complete:
            sent += transcript.closing()
            break
        call = transcript.resume()
    return sent, transcript


def unbroken(call: Call) -> list[bytes]:
    return list(events(asked_by(call), id_="id-0", created=0))


def assert_same(sent: Sequence[bytes], expected: Sequence[bytes]) -> None:
    assert seen(sent) == seen(expected)


KINDS: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 12, "return_token_ids": True},
    {"max_tokens": 12, "stream_options": {"include_usage": True}},
    {"max_tokens": 24, "stop": ["xyz", "qqqq"]},
    {"max_tokens": 24, "stop": "cd", "return_token_ids": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 24, "stop": ["b cd", 'é"'], "include_stop_str_in_output": True},
    {"max_tokens": 24, "stop": "b", "min_tokens": 9},
    {"max_tokens": 24, "stop_token_ids": [3, 9, 11], "min_tokens": 4},
    {},
]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_after_any_event_ends_as_if_it_had_not(kind: dict[str, Any], chat: bool) -> None:
    call = call_of(kind, chat=chat)
    expected = unbroken(call)
    for first in range(1, len(expected)):
        sent, _ = play(call, [first])
        assert_same(sent, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_breaks_twice_ends_as_if_it_had_not(kind: dict[str, Any]) -> None:
    call = call_of(kind, chat=True)
    expected = unbroken(call)
    for first, second in itertools.product(range(1, len(expected)), range(8)):
        sent, _ = play(call, [first, second])
        assert_same(sent, expected)


requests = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 40), "prompt": st.lists(st.integers(0, 38), min_size=1, max_size=4)},
    optional={
        "stop": st.lists(st.sampled_from([" a", "cd", "b cd", "é", "🙂b", '"', "\n\n", "zzzzzzz"]), max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.integers(0, 10),
        "stop_token_ids": st.lists(st.integers(0, 38), max_size=2),
        "return_token_ids": st.booleans(),
        "stream_options": st.just({"include_usage": True}),
    },
)
patterns = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=400)
@given(requests, st.booleans(), st.lists(st.integers(1, 20), max_size=3), patterns)
def test_a_stream_may_break_however_its_tokens_come_together(
    body: dict[str, Any], chat: bool, breaks: list[int], together: list[list[int]]
) -> None:
    call = call_of(body, chat=chat)
    sent, _ = play(call, breaks, together)
    assert_same(sent, unbroken(call))


# --- what is asked of the workers --------------------------------------------------------------------


def resumed(body: dict[str, Any], after: int, *, chat: bool = False) -> Call:
    transcript = engine.transcript(call_of(body, chat=chat), LIMIT)
    for event in itertools.islice(events(asked_by(transcript.call)), after):
        transcript.add(event)
    return transcript.resume()


def test_both_legs_of_a_completion_begin_with_the_tokens_that_were_sent() -> None:
    call = resumed({"max_tokens": 9, "min_tokens": 2}, 3)
    output = [step.token for step in itertools.islice(steps(Asked([5, 6, 7], 9)), 3)]
    for body in (engine.prefill_body(call), engine.decode_body(call, None)):
        assert json.loads(body)["prompt"] == [5, 6, 7, *output]
    decode = json.loads(engine.decode_body(call, None))
    assert (decode["max_tokens"], decode["min_tokens"]) == (6, 0)  # 9 - 3, and 2 are out
    assert call.output_tokens == 6


def test_both_legs_of_a_chat_are_given_the_tokens_beside_the_messages() -> None:
    call = resumed({"max_completion_tokens": 9}, 1 + 2, chat=True)  # the first event has no token
    handoff = engine.handoff(b'{"usage":{"prompt_tokens":1},"kv_transfer_params":{"remote_host":"x"}}')
    prefill, decode = (json.loads(raw) for raw in (engine.prefill_body(call), engine.decode_body(call, handoff)))
    ids = prefill["kv_transfer_params"].pop("prompt_token_ids")
    assert ids == decode["kv_transfer_params"].pop("prompt_token_ids")
    assert ids[:2] == [100, 101]
    assert len(ids) == 2 + 2
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode["kv_transfer_params"] == {"remote_host": "x"}
    assert decode["messages"] == [{"role": "user", "content": "hi"}]
    assert decode["max_completion_tokens"] == 7


def test_a_completion_without_a_limit_has_what_is_left_of_vllms_own() -> None:
    assert json.loads(engine.decode_body(resumed({}, 5), None))["max_tokens"] == 11  # 16 - 5


def test_a_chat_without_a_limit_has_none_when_it_goes_on() -> None:
    assert "max_tokens" not in json.loads(engine.decode_body(resumed({}, 5, chat=True), None))


def test_a_stream_of_which_nothing_came_begins_anew() -> None:
    body = json.loads(engine.decode_body(resumed({"max_tokens": 9}, 0), None))
    assert (body["prompt"], body["max_tokens"]) == ([5, 6, 7], 9)


def test_tokens_whose_text_is_not_out_are_made_again() -> None:
    transcript = engine.transcript(call_of({"max_tokens": 9, "prompt": [0]}, chat=False), LIMIT)
    for ids, text in (([0], " a"), ([3, 4], "eé"), ([5], ""), ([6], "")):  # two bytes of a character of four
        transcript.add(completion_event(ids, text, prompt=[0] if ids == [0] else None))
    # The third token came with text, but another came with it: that it ended a character is not sure.
    assert json.loads(engine.decode_body(transcript.resume(), None))["prompt"] == [0, 0]


def completion_event(ids: list[int] | None, text: str, prompt: list[int] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "prompt_token_ids": prompt, "token_ids": ids, **more}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode()


# --- what is left for the gateway to say -------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
def test_a_stream_that_breaks_behind_its_last_token_is_closed_without_a_worker(chat: bool, usage: Any) -> None:
    call = call_of({"max_tokens": 4, "stream_options": usage}, chat=chat)
    expected = unbroken(call)
    for missing in range(1, 3 if usage else 2):
        sent, transcript = play(call, [len(expected) - missing])
        assert_same(sent, expected)
        assert transcript.complete


@pytest.mark.parametrize("chat", [False, True])
def test_a_limit_that_is_reached_is_the_end_though_no_event_said_so(chat: bool) -> None:
    asked = asked_by(call_of({}, chat=chat))
    limit = next(number for number, step in enumerate(steps(asked), 1) if step.text and number > 3)
    call = call_of({"max_tokens": limit}, chat=chat)
    expected = unbroken(call)
    transcript = engine.transcript(call, LIMIT)
    made = list(events(asked_by(transcript.call), id_="id-0", created=0))[:-1]
    unsaid = [event.replace(b'"finish_reason":"length"', b'"finish_reason":null') for event in made]
    sent = [transcript.add(event) for event in unsaid]
    assert transcript.complete
    got = seen([*sent, *transcript.closing()])
    assert got == seen(expected)


# --- what is left alone, what is refused -------------------------------------------------------------


def test_a_client_that_asks_for_tokens_gets_the_workers_events_untouched() -> None:
    transcript = engine.transcript(call_of({"max_tokens": 9, "return_token_ids": True}, chat=False), LIMIT)
    made = list(events(asked_by(transcript.call)))
    assert [transcript.add(event) for event in made] == made


@given(st.text(), st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=3))
def test_hidden_tokens_leave_every_other_byte_as_it_came(text: str, ids: list[int]) -> None:
    text += '"token_ids":[1] \\"prompt_token_ids\\":[2]'
    for ascii_, prompt in itertools.product([False, True], [[7, 8], None]):
        choice = {"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": prompt}
        raw = json.dumps({"x": [1], "choices": [choice]}, separators=(",", ":"), ensure_ascii=ascii_).encode(
            "utf-8", "surrogatepass"
        )
        hidden = {**choice, "token_ids": None, "prompt_token_ids": None}
        expected = json.dumps({"x": [1], "choices": [hidden]}, separators=(",", ":"), ensure_ascii=ascii_).encode(
            "utf-8", "surrogatepass"
        )
        transcript = engine.transcript(call_of({}, chat=False), LIMIT)
        assert transcript.add(b"data: " + raw) == b"data: " + expected


tricky = st.text() | st.sampled_from(['"', "\\", '\\"', '"},"logprobs":null', "]}]}", '"token_ids":[1', "x" * 300])


@given(st.lists(st.tuples(tricky, st.lists(st.integers(0, 1 << 31), max_size=2), st.sampled_from([None, "stop"]))))
def test_events_are_read_alike_whether_or_not_they_are_like_the_last(rows: list[Any]) -> None:
    transcript = engine.transcript(call_of({}, chat=False), LIMIT)
    transcript.add(completion_event([3], "plain", prompt=[1]))  # from now on those like it are read in the short way
    ids = [3]
    for text, new, finish in rows:
        event = completion_event(new, text, finish_reason=finish)
        assert transcript.add(event) == completion_event(None, text, finish_reason=finish)
        ids += new
    assert transcript._ids.tolist() == ids


@pytest.mark.parametrize("event", [b": a comment", b"", b"event: x", b"data: [DONE]", b"data: 7"])
def test_what_is_no_event_of_an_output_passes(event: bytes) -> None:
    transcript = engine.transcript(call_of({}, chat=False), LIMIT)
    assert transcript.add(event) == event
    assert transcript.closed == (event == b"data: [DONE]")


REFUSED = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "repetition_penalty": 1.1,
    "logprobs": 1,
    "tools": [{"type": "function"}],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "bad_words": ["x"],
    "vllm_xargs": {"a": 1},
    "truncate_prompt_tokens": 5,
    "thinking_token_budget": 5,
    "a_field_that_nobody_knows": 0,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_go_on_is_known_by_its_fields(name: str) -> None:
    why = engine.why_unresumable(call_of({name: REFUSED[name]}, chat=False), sampled=True)
    assert why == f"the request sets {name}"


def test_fields_that_ask_for_nothing_are_no_hindrance() -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "n": 1, "logprobs": None}
    more = {"tools": [], "tool_choice": "auto", "response_format": None, "top_logprobs": 0, "user": "me", "seed": 3}
    assert engine.why_unresumable(call_of({**neutral, **more}, chat=True), sampled=True) is None


def test_several_choices_and_other_endpoints_cannot_go_on() -> None:
    assert engine.why_unresumable(call_of({"n": 2}, chat=False), sampled=True) == "the request has n > 1"
    other = engine.parse("/inference/v1/generate", b'{"token_ids":[1],"sampling_params":{},"stream":true}')
    assert engine.why_unresumable(other, sampled=True) == "it is a request of /inference/v1/generate"


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (0.1, False), (None, False), (1, False)])
def test_a_sampled_stream_goes_on_only_where_it_may(temperature: float | None, greedy: bool) -> None:
    call = call_of({"temperature": temperature}, chat=False)
    assert (engine.why_unresumable(call, sampled=False) is None) == greedy
    assert engine.why_unresumable(call, sampled=True) is None


def test_a_sampled_stream_goes_on_from_what_was_sent() -> None:
    call = call_of({"temperature": 1, "max_tokens": 12, "stream_options": {"include_usage": True}}, chat=False)
    transcript = engine.transcript(call, LIMIT)
    first = list(itertools.islice(events(asked_by(transcript.call)), 5))
    sent = [transcript.add(event) for event in first]
    rest = replace(asked_by(transcript.resume()), choose=lambda tokens: (greedy(tokens) + 5) % 38)
    sent += [transcript.add(event) for event in events(rest, id_="other")]
    got = seen([event for event in sent if event])
    kept = json.loads(engine.decode_body(call, None))
    assert got.identities == {'["cmpl-1", "text_completion", 1, "tiny"]'}
    assert got.usage == [{"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}]
    tokens = rest.prompt[3:] + [step.token for step in steps(rest)]
    assert (len(tokens), kept["max_tokens"]) == (12, 12)
    assert got.text == text_of(tokens)


def test_no_more_of_the_prompt_is_told_to_be_cached_than_there_is() -> None:
    transcript = engine.transcript(call_of({"max_tokens": 9}, chat=False), LIMIT)
    for event in itertools.islice(events(asked_by(transcript.call)), 4):
        transcript.add(event)
    kept = json.loads(engine.decode_body(transcript.resume(), None))["prompt"]
    assert len(kept) == 7
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    event = transcript.add(b'data: {"choices":[],"usage":%b}' % json.dumps(usage).encode())
    told = json.loads(event.removeprefix(b"data: "))["usage"]
    assert told["prompt_tokens"] == told["prompt_tokens_details"]["cached_tokens"] == 3
    assert (told["completion_tokens"], told["total_tokens"]) == (9, 12)


def test_a_sampled_stream_with_text_held_back_does_not_go_on() -> None:
    call = call_of({"temperature": 1, "max_tokens": 24, "stop": "zzzz"}, chat=False)
    transcript = engine.transcript(call, LIMIT)
    for event in itertools.islice(events(asked_by(transcript.call)), 12):
        transcript.add(event)
    with pytest.raises(UnresumableError, match="sampled"):
        transcript.resume()


def test_other_tokens_than_those_that_were_shown_end_the_stream() -> None:
    call = call_of({"max_tokens": 24, "stop": "zzzz"}, chat=False)
    transcript = engine.transcript(call, LIMIT)
    for event in itertools.islice(events(asked_by(transcript.call)), 12):
        transcript.add(event)
    other = replace(asked_by(transcript.resume()), choose=lambda tokens: (greedy(tokens) + 1) % 38)
    made = list(events(other))
    with pytest.raises(EngineError, match="other tokens"):
        list(map(transcript.add, made))


def test_a_worker_that_begins_anew_is_found_out() -> None:
    transcript = engine.transcript(call_of({"max_tokens": 9}, chat=True), LIMIT)
    for event in itertools.islice(events(asked_by(transcript.call)), 5):
        transcript.add(event)
    transcript.resume()
    with pytest.raises(EngineError, match="did not go on"):
        transcript.add(next(events(Asked([100, 101], 9, chat=True, ids=True))))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'data: {"error":{"message":"EngineCore died","code":500}}', "ends with an error event"),
        (completion_event([4], "x", finish_reason="abort"), "gave the request up"),
        (b'data: {"choices":[', "cannot be read"),
        (b'data: {"choices":[{"text":"\xff"}]}', "cannot be read"),
    ],
)
def test_a_worker_that_says_that_it_failed_is_lost(event: bytes, message: str) -> None:
    transcript = engine.transcript(call_of({}, chat=False), LIMIT)
    transcript.add(completion_event([3], "x", prompt=[1]))
    with pytest.raises(EngineError, match=message):
        transcript.add(event)
    transcript.resume()


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"tool_calls": []}, {"content": "x", "refusal": None}])
def test_a_reply_of_more_than_text_passes_and_does_not_go_on(delta: dict[str, Any]) -> None:
    transcript = engine.transcript(call_of({}, chat=True), LIMIT)
    transcript.add(next(events(Asked([1], 3, chat=True, ids=True))))
    raw = json.dumps({"choices": [{"index": 0, "delta": delta, "token_ids": [5]}]}, separators=(",", ":"))
    assert json.loads(transcript.add(b"data: " + raw.encode())[6:])["choices"][0]["token_ids"] is None
    with pytest.raises(UnresumableError, match="more than text"):
        transcript.resume()


def test_a_chat_with_pictures_does_not_go_on() -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "x"}}]
    transcript = engine.transcript(call_of({"messages": [{"role": "user", "content": parts}]}, chat=True), LIMIT)
    transcript.add(next(events(Asked([1], 3, chat=True, ids=True))))
    with pytest.raises(UnresumableError, match="messages"):
        transcript.resume()


@pytest.mark.parametrize(("limit", "after", "message"), [(2, 1, "prompt has over 2"), (5, 6, "output has over 5")])
def test_a_stream_that_is_too_long_to_keep_passes_and_does_not_go_on(limit: int, after: int, message: str) -> None:
    call = call_of({"max_tokens": 9}, chat=False)
    expected = unbroken(call)
    transcript = engine.transcript(call, limit)
    made = events(asked_by(transcript.call), id_="id-0", created=0)
    sent = [transcript.add(event) for event in itertools.islice(made, after)]
    with pytest.raises(UnresumableError, match=message):
        transcript.resume()
    assert sent + [transcript.add(event) for event in made] == expected


def test_a_worker_that_names_no_tokens_is_not_gone_on_from() -> None:
    transcript = engine.transcript(call_of({}, chat=False), LIMIT)
    event = completion_event(None, "x")
    assert transcript.add(event) == event
    with pytest.raises(UnresumableError, match="does not name tokens"):
        transcript.resume()
