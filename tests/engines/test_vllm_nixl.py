"""Bodies for vLLM with NIXL: what is changed, and that nothing else is."""

from __future__ import annotations

import contextlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie import wire
from coterie.core import ExpertCounts, ModelGeometry, Reading
from coterie.engines.vllm_nixl import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    VllmNixl,
    kv_transfer_config,
)
from coterie.errors import EngineError, RequestError, WireError

engine = VllmNixl()
REPLY = b'{"usage":{"prompt_tokens":5},"kv_transfer_params":{"remote_block_ids":[[1, 2]],"new":{"a" :1e3}}}'

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
reserved = ("kv_transfer_params", "ec_transfer_params", "bootstrap_", "routed_")
typed = {
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "prompt_logprobs",
    "echo",
    "prompt",
    "messages",
    "vllm_xargs",
}
unknown = st.dictionaries(st.text().filter(lambda name: not name.startswith(reserved) and name not in typed), values)


@given(unknown, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_unknown_fields_pass_byte_for_byte(fields: dict[str, object], indent: int | str | None, ascii_: bool) -> None:
    body = json.dumps({"prompt": "x", **fields}, indent=indent, ensure_ascii=ascii_).encode("utf-8", "surrogatepass")
    try:
        sent = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # lone surrogates are not UTF-8; whether they are refused is not the point here
    call = engine.parse(COMPLETIONS, body)
    passed = msgspec.json.decode(engine.decode_body(call, engine.handoff(REPLY)), type=dict[str, msgspec.Raw])
    assert {name: bytes(raw) for name, raw in passed.items() if name != "kv_transfer_params"} == {
        name: bytes(raw) for name, raw in sent.items()
    }
    assert bytes(passed["kv_transfer_params"]) == b'{"remote_block_ids":[[1, 2]],"new":{"a" :1e3}}'


@pytest.mark.parametrize(
    "field", ["kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_room", "routed_dp_rank"]
)
def test_clients_cannot_set_what_steers_transfer_and_placement(field: str) -> None:
    call = engine.parse(COMPLETIONS, json.dumps({"prompt": "x", field: {"do_remote_prefill": True}}).encode())
    assert json.loads(engine.decode_body(call, None)) == {"prompt": "x"}
    assert field == "kv_transfer_params" or field not in json.loads(engine.prefill_body(call))


def test_clients_cannot_set_it_through_the_extra_arguments_either() -> None:
    smuggled = {"kv_transfer_params": "x", "ec_transfer_params": "x", "seed": 1}
    body = json.dumps({"prompt": "x", "echo": True, "vllm_xargs": smuggled}).encode()
    call = engine.parse(COMPLETIONS, body)
    assert json.loads(engine.decode_body(call, None))["vllm_xargs"] == {"seed": 1}
    kept = b'{"prompt":"x","vllm_xargs":{"seed" : 1}}'
    assert engine.decode_body(engine.parse(COMPLETIONS, kept), None) == kept
    with pytest.raises(RequestError, match="vllm_xargs"):
        engine.parse(COMPLETIONS, b'{"prompt":"x","vllm_xargs":["kv_transfer_params"]}')


@pytest.mark.parametrize("envelope", [b'"\xff"', b'{"a":"\xff"}', b"1e999", b"1" * 400])
def test_an_envelope_that_is_not_json_is_a_wire_error(envelope: bytes) -> None:
    reply = b'{"kv_transfer_params":{"remote_block_ids":[[1]],"coterie":%b}}' % envelope
    with pytest.raises(WireError):
        engine.counts(engine.handoff(reply))


def test_the_prefill_body_has_one_token_whatever_limits_the_client_set() -> None:
    body = {
        "messages": [],
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "min_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
        "min_completion_tokens": 3,
        "best_of": 1,
        "tools": [1],
    }
    call = engine.parse(CHAT, json.dumps(body).encode())
    sent = json.loads(engine.prefill_body(call))
    assert sent.pop("kv_transfer_params")["do_remote_decode"] is True
    assert sent == {
        "messages": [],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "min_completion_tokens": 1,
        "stream": False,
        "n": 1,
        "tools": [1],
    }
    assert call.stream
    assert call.output_tokens == 8
    assert "max_completion_tokens" not in json.loads(engine.prefill_body(engine.parse(COMPLETIONS, b'{"prompt": "x"}')))


@pytest.mark.parametrize(("asked", "sent"), [("0", "0"), ("null", "null"), ("1", "1"), ("7", "1")])
def test_a_first_token_that_may_not_end_the_output_may_not_end_it_at_the_prefill_server(asked: str, sent: str) -> None:
    call = engine.parse(COMPLETIONS, f'{{"prompt": "x", "max_tokens": 9, "min_tokens": {asked}}}'.encode())
    assert json.loads(engine.prefill_body(call))["min_tokens"] == json.loads(sent)


def test_what_shapes_the_prompt_or_the_first_token_goes_to_both_servers() -> None:
    shaping = {"stop": ["x"], "ignore_eos": True, "truncate_prompt_tokens": 5, "seed": 3, "logprobs": 2}
    call = engine.parse(COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 9, **shaping}).encode())
    sent = json.loads(engine.prefill_body(call))
    assert {name: sent[name] for name in shaping} == shaping


@pytest.mark.parametrize(
    ("path", "limits", "only", "limit"),
    [
        (COMPLETIONS, {"max_tokens": 1}, True, 1),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}, True, 0),
        (COMPLETIONS, {"max_tokens": 1, "n": 2}, True, 1),
        (COMPLETIONS, {"max_tokens": 2}, False, 2),
        (COMPLETIONS, {"max_tokens": 9, "max_completion_tokens": 1}, False, 9),  # vLLM reads it for chats only
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 1}, True, 1),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": None}, True, 1),
        (CHAT, {}, False, None),
        (GENERATE, {"sampling_params": {"max_tokens": 1}}, True, 1),
        (GENERATE, {"sampling_params": {}, "max_tokens": 1}, False, None),
        (RESPONSES, {"max_output_tokens": 1}, False, 1),
        (MESSAGES, {"max_tokens": 1}, False, 1),
    ],
)
def test_an_answer_of_one_token_needs_the_prefill_server_alone(
    path: str, limits: dict[str, object], only: bool, limit: int | None
) -> None:
    call = engine.parse(path, json.dumps(limits).encode())
    assert (call.prefill_only, call.output_tokens) == (only, limit)


def test_token_ids_are_split_by_their_sampling_fields() -> None:
    sampling = {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "new": [1], "extra_args": {"a": 1}}
    smuggled = {**sampling, "extra_args": {"a": 1, "kv_transfer_params": {"do_remote_prefill": True}}}
    body = {"token_ids": [5, 6], "stream": True, "stream_options": {}, "sampling_params": smuggled, "new": 2}
    call = engine.parse(GENERATE, json.dumps(body).encode())
    assert (call.output_tokens, call.prompt, call.undividable) == (9, b"[5, 6]", None)
    assert json.loads(engine.decode_body(call, None)) == {**body, "sampling_params": sampling}
    sent = json.loads(engine.prefill_body(call))
    assert sent.pop("kv_transfer_params")["do_remote_decode"] is True
    cut = {**sampling, "max_tokens": 1, "min_tokens": 1, "n": 1}
    assert sent == {"token_ids": [5, 6], "stream": False, "sampling_params": cut, "new": 2}
    several = engine.parse(GENERATE, b'{"token_ids": [1], "sampling_params": {"n": 2}}')
    assert several.undividable == "n > 1"
    with pytest.raises(RequestError, match="sampling_params: must be an object"):
        engine.parse(GENERATE, b'{"token_ids": [1]}')


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, RESPONSES, MESSAGES])
def test_the_experts_of_each_token_are_refused_by_name(path: str) -> None:
    for asked in ({"routed_experts_prompt_start": 0}, {"return_routed_experts": True}):
        for body in (asked, {"sampling_params": asked}) if path == GENERATE else (asked,):
            with pytest.raises(RequestError, match="split servers cannot return the experts") as refused:
                engine.parse(path, json.dumps(body).encode())
            assert refused.value.param in asked
    unasked = {"routed_experts_prompt_start": None, "return_routed_experts": False, "sampling_params": {}}
    engine.parse(path, json.dumps(unasked).encode())


@pytest.mark.parametrize(
    ("choices", "params", "expected"),
    [
        ([{"finish_reason": "length"}], {"a": 1}, (True, False)),
        ([{"finish_reason": "stop"}], {"a": 1}, (True, True)),
        ([{"finish_reason": "stop"}], None, (False, True)),
        ([{"finish_reason": "length"}], None, (False, False)),
        ([{"finish_reason": "abort"}], None, (False, False)),
        ([], {"a": 1}, (True, False)),
    ],
)
def test_a_prefill_reply_says_what_waits_and_whether_all_is_said(
    choices: list[dict[str, str]], params: dict[str, int] | None, expected: tuple[bool, bool]
) -> None:
    read = engine.prefilled(json.dumps({"choices": choices, "kv_transfer_params": params}).encode())
    assert (read.handoff is not None, read.ended) == expected


def test_a_release_is_the_prefill_body_with_the_handoff() -> None:
    call = engine.parse(COMPLETIONS, b'{"prompt": "x", "max_tokens": 100, "stream": true}')
    sent = json.loads(engine.release_body(call, engine.handoff(REPLY)))
    assert sent == {
        "prompt": "x",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"remote_block_ids": [[1, 2]], "new": {"a": 1000.0}},
    }


def test_the_envelopes_are_taken_out_of_what_the_decode_server_sees() -> None:
    geometry = ModelGeometry(1, 2, 1)
    counts = ExpertCounts(geometry, np.array([[3, 2]], np.uint8), 5, 5)
    params = {"a": 1, "coterie": wire.encode_counts(counts), "coterie_output": {}}
    handoff = engine.handoff(json.dumps({"usage": {"prompt_tokens": 5}, "kv_transfer_params": params}).encode())
    assert {name: bytes(raw) for name, raw in handoff.params.items()} == {"a": b"1"}
    assert handoff.prompt_tokens == 5
    read = engine.counts(handoff)
    assert read is not None
    assert read.counts.tolist() == [[3, 2]]
    assert engine.counts(engine.handoff(REPLY)) is None


@pytest.mark.parametrize("envelope", [1, "x", [], {}, {"v": 2}])
def test_a_wrong_envelope_is_found_only_when_it_is_read(envelope: object) -> None:
    handoff = engine.handoff(json.dumps({"kv_transfer_params": {"a": 1, "coterie": envelope}}).encode())
    with pytest.raises(WireError):
        engine.counts(handoff)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": 1}',
        b"<html>",
        b'{"kv_transfer_params": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
)
def test_a_reply_without_a_handoff_is_an_engine_error(reply: bytes) -> None:
    with pytest.raises(EngineError):
        engine.handoff(reply)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "n > 1"),
        ({"best_of": 3}, "best_of > 1"),
        ({"use_beam_search": True}, "beam search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens < 0"),
        ({"truncate_prompt_tokens": 8}, None),
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "several prompts in one request"),
        ({"prompt": [[1, 2], [3]]}, "several prompts in one request"),
        ({"prompt": ["a"]}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"n": 1, "best_of": None, "echo": False, "prompt_logprobs": None}, None),
    ],
)
def test_requests_that_one_handoff_cannot_stand_for_are_told_apart(fields: dict[str, object], why: str | None) -> None:
    assert engine.parse(COMPLETIONS, json.dumps({"prompt": "x", **fields}).encode()).undividable == why


@given(st.binary(max_size=60))
def test_any_bytes_are_a_call_or_a_request_error(body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        with contextlib.suppress(RequestError):
            engine.prefill_body(engine.parse(path, body))


@given(st.dictionaries(st.sampled_from(sorted(typed)), values))
def test_any_values_of_the_fields_that_are_read_are_a_call_or_a_request_error(fields: dict[str, object]) -> None:
    body = json.dumps(fields).encode()
    with contextlib.suppress(RequestError):
        call = engine.parse(COMPLETIONS, body)
        assert json.loads(engine.decode_body(call, None)) == json.loads(body)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RequestError):
        engine.parse(COMPLETIONS, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_the_models_are_read() -> None:
    assert engine.model_ids(b'{"object": "list", "data": [{"id": "a", "x": 1}, {"id": "b"}]}') == ["a", "b"]
    with pytest.raises(EngineError):
        engine.model_ids(b"{}")


METRICS = b"""# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_waiting{engine="0",model_name="m"} 9.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 7.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 1.0
"""


def test_load_is_the_fullest_engines_kv_and_the_sum_of_those_that_wait_for_room() -> None:
    assert engine.reading(METRICS) == Reading(0.5, 3)


@pytest.mark.parametrize(
    ("there", "instead", "words"),
    [
        (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", "do not show vllm:kv_cache_usage_perc"),
        (b"_by_reason", b"_by_whim", "do not show vllm:num_requests_waiting_by_reason"),
        (b"} 0.5\n", b"} half\n", "cannot be read"),
        (b"} 0.5\n", b"\n", "cannot be read"),
        (b"} 0.5\n", b"} 1.5\n", "cannot be right"),
        (b"} 2.0\n", b"} nan\n", "cannot be right"),
        (b"} 2.0\n", b"} inf\n", "cannot be right"),
    ],
)
def test_load_that_is_missing_or_cannot_be_is_refused(there: bytes, instead: bytes, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        engine.reading(METRICS.replace(there, instead))


def test_fetched_tokens_are_those_of_all_engines_of_a_server() -> None:
    name = b"vllm:external_prefix_cache_hits_total"
    shown = b'%b{engine="0"} 3.0\n%b{engine="1"} 4.0\nvllm:external_prefix_cache_hits_created{engine="0"} 9.0\n'
    assert engine.fetched_tokens(shown % (name, name)) == 7
    with pytest.raises(EngineError, match="do not show vllm:external_prefix_cache_hits_total"):
        engine.fetched_tokens(METRICS)


@pytest.mark.parametrize(
    ("shown", "policy"),
    [
        (b'{"vllm_config": {"kv_transfer_config": {"kv_load_failure_policy": "recompute"}}, "x": 1}', "recompute"),
        (b'{"vllm_config": {"kv_transfer_config": null}}', None),
        (b'{"vllm_config": "as text"}', None),
        (b'{"object": "list"}', None),
        (b"<html>", None),
    ],
)
def test_what_a_server_does_without_its_kv_is_read_where_it_is_shown(shown: bytes, policy: str | None) -> None:
    assert engine.on_lost_kv(shown) == policy


def test_prefill_servers_run_the_counts_connector_beside_nixl_and_decode_servers_nixl_alone() -> None:
    decode = json.loads(kv_transfer_config("decode", kv_buffer_device="cpu"))
    assert decode == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu",
    }
    prefill = json.loads(kv_transfer_config("prefill", kv_buffer_device="cpu"))
    assert prefill["kv_connector"] == "MultiConnector"
    nixl, counts = prefill["kv_connector_extra_config"]["connectors"]
    assert nixl == decode
    assert counts["kv_connector_module_path"] == "coterie.vllm_plugin.connector"
    assert "kv_buffer_device" not in json.loads(kv_transfer_config("decode"))
