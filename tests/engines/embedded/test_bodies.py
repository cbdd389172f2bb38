"""What a request may say, and what is refused by name; how vLLM's KV parameters are read."""

import json

import pytest

from coterie.engines.embedded.bodies import Chat, read_chat, read_completion, read_generate, read_tokenize
from coterie.engines.embedded.messages import RemoteKv
from coterie.engines.embedded.request import KeptBlocks
from coterie.engines.embedded.sampling import SamplingParams
from coterie.engines.embedded.transfer import Transfer, handoff_params
from coterie.engines.vllm_nixl import COMPLETIONS, VllmNixl
from coterie.errors import RequestError

REMOTE = RemoteKv("10.0.0.1", 5600, "0f" * 16, "cmpl-1", (4, 2), 20)
KEPT = handoff_params("cmpl-1", KeptBlocks((4, 2), 20, 0.0), 16, "0f" * 16, ("10.0.0.1", 5600), {})


def completion(**fields):
    return read_completion(json.dumps({"prompt": "a", **fields}).encode())


def test_a_bare_completion_has_the_defaults_of_vllm():
    call = completion()
    assert (call.model, call.prompts, call.chat, call.n, call.stream) == (None, ("a",), None, 1, False)
    assert call.params == SamplingParams(max_tokens=16)
    assert call.transfer == Transfer()


@pytest.mark.parametrize("with_total", [True, False])
def test_usage_in_every_chunk_is_given_only_with_that_at_the_end_as_in_vllm(with_total):
    options = {"include_usage": with_total, "continuous_usage_stats": True}
    call = completion(prompt="a", stream=True, stream_options=options)
    assert (call.include_usage, call.continuous_usage) == (with_total, with_total)


def test_everything_that_is_served_is_read():
    call = completion(
        model="m", prompt=["a", "b"], n=2, max_tokens=5, min_tokens=2, temperature=0.5, top_p=0.9, top_k=3, seed=7,
        stop=["x", "y"], stop_token_ids=[4], ignore_eos=True, stream=True, stream_options={"include_usage": True},
        return_token_ids=True, user="someone", logprobs=None, frequency_penalty=0.0, best_of=1, logit_bias={},
    )  # fmt: skip
    assert (call.model, call.prompts, call.n, call.stream, call.include_usage) == ("m", ("a", "b"), 2, True, True)
    assert not call.continuous_usage
    assert call.return_token_ids
    assert call.params == SamplingParams(5, 2, 0.5, 0.9, 3, 7, ("x", "y"), frozenset({4}), True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", "b"], ("a", "b")),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


def test_a_chat_goes_on_to_the_end_of_the_context_unless_it_says_otherwise():
    said = [{"role": "user", "content": "hi"}]

    def chat(**fields):
        return read_chat(json.dumps({"messages": said, **fields}).encode())

    assert chat().chat == Chat(tuple(said), {}, True)
    assert chat().params.max_tokens is None
    assert chat(max_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=4).params.max_tokens == 4
    assert chat(chat_template_kwargs={"x": 1}, add_generation_prompt=False).chat == Chat(tuple(said), {"x": 1}, False)
    assert read_tokenize(json.dumps({"messages": said, "model": "m"}).encode()) == ("m", Chat(tuple(said), {}, True))
    assert read_tokenize(b'{"prompt": "a", "add_generation_prompt": true}') == (None, "a")


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ["a", 1]}, "prompt", "or a list of either"),
        ({"prompt": [-1]}, "prompt", "negative"),
        ({"prompt": 1.5}, "prompt", "Expected"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "200 choices"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "Expected `int`"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens"),
        ({"temperature": "hot"}, "temperature", "Expected `float`"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"stop": [""]}, "stop", "characters"),
        ({"logprobs": 0}, "logprobs", "leave it out"),
        ({"echo": True}, "echo", "or send false"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"guided_json": {}}, "guided_json", "does not know"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "does not know"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "include_obfuscation"),
        ({"kv_transfer_params": 3}, "kv_transfer_params", "Expected"),
        ({"kv_transfer_params": {"coterie": "all"}}, "kv_transfer_params", "one of counts, counts\\+ids"),
        ({"kv_transfer_params": {"do_remote_decode": True}, "n": 2}, "kv_transfer_params", "one choice, not for 2"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param, problem):
    with pytest.raises(RequestError, match=problem) as refused:
        completion(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 5000, b'{"prompt": "a", "n": 1'])
def test_what_is_no_json_object_is_refused(body):
    for read in (read_completion, read_chat, read_generate, read_tokenize):
        with pytest.raises(RequestError):
            read(body)


def test_token_ids_have_their_sampling_fields_in_an_object_of_their_own():
    def generate(**fields):
        return read_generate(json.dumps(fields).encode())

    body = {"token_ids": [5, 6], "model": "m", "stream": True, "request_id": "r", "output_mode": "tokens"}
    call = generate(**body, sampling_params={"max_tokens": 3, "n": 2, "seed": 1, "detokenize": True})
    assert (call.prompts, call.tokens, call.n, call.stream) == (((5, 6),), True, 2, True)
    assert call.params == SamplingParams(max_tokens=3, seed=1)
    assert generate(token_ids=[5], sampling_params={}).params.max_tokens is None  # as vLLM: to the end of the context
    for wrong, param in [
        ({"token_ids": [5]}, "sampling_params"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [5], "sampling_params": {}, "max_tokens": 3}, "max_tokens"),
        ({"token_ids": [5], "sampling_params": {"stream": True}}, "stream"),
        ({"token_ids": [5], "sampling_params": {}, "output_mode": "text"}, "output_mode"),
    ]:
        with pytest.raises(RequestError) as refused:
            generate(**wrong)
        assert refused.value.param == param
    with pytest.raises(RequestError, match="sampling_params must be a JSON object"):
        generate(token_ids=[5], sampling_params=3)


@pytest.mark.parametrize("messages", [[], [{}], [{"role": 1}], "hello", [1]])
def test_messages_need_roles(messages):
    with pytest.raises(RequestError, match="messages"):
        read_chat(json.dumps({"messages": messages}).encode())


# --- kv_transfer_params ----------------------------------------------------------------------------------


def test_the_bodies_of_the_gateway_are_understood():
    gateway = VllmNixl()
    call = gateway.parse(COMPLETIONS, b'{"prompt": "a", "max_tokens": 30, "min_tokens": 3, "stream": true}')
    asked = read_completion(gateway.prefill_body(call))
    assert asked.transfer == Transfer(keep=True)
    assert (asked.params.max_tokens, asked.stream) == (1, False)
    handoff = gateway.handoff(json.dumps({"kv_transfer_params": {**KEPT, "coterie": {"v": 1}}}).encode())
    decode = read_completion(gateway.decode_body(call, handoff))
    assert decode.transfer == Transfer(remote=REMOTE, remote_cached=16)
    assert (decode.params.max_tokens, decode.stream) == (30, True)
    release = read_completion(gateway.release_body(call, handoff))
    assert (release.transfer, release.params.max_tokens) == (Transfer(remote=REMOTE, remote_cached=16), 1)


def test_what_a_router_adds_or_passes_on_is_read_or_left():
    params = {**KEPT, "coterie": {"v": 1, "counts": "..."}, "dcp_size": 1, "prompt_token_ids": [5, 6]}
    assert completion(kv_transfer_params=params).transfer == Transfer(
        remote=REMOTE, remote_cached=16, prompt_ids=(5, 6)
    )
    assert completion(kv_transfer_params={"coterie": "counts"}).transfer == Transfer(asked="counts")
    nothing = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_port": None}
    assert completion(kv_transfer_params=nothing).transfer == Transfer(keep=True)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"remote_host": None}, "needs remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_engine_id": "x"}, "remote_engine_id"),
        ({"remote_block_ids": [[1], [2]]}, "remote_block_ids"),
        ({"remote_block_ids": [1]}, "remote_block_ids"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_num_tokens": 0}, "remote_num_tokens"),
        ({"tp_size": 2}, "KV of one rank"),
        ({"do_remote_decode": True}, "exclude one another"),
    ],
)
def test_remote_kv_that_is_not_whole_is_refused(changes, problem):
    with pytest.raises(RequestError, match=problem):
        completion(kv_transfer_params={**KEPT, **changes})
