"""Real worker processes: KV handed over gives what one process gives, and nothing is left of what was broken off."""

from __future__ import annotations

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from workers import HTTP, running

from coterie.engines.embedded.kv import PREFIX, KvFile
from coterie.shm import FOLDER
from coterie.wire import OUTPUT_IDS_KEY, OUTPUT_KEY, PROMPT_KEY, count_ids, decode_counts, read_routed_experts
from waiting import wait_until

RNG = np.random.default_rng(7)


def some_prompt(tokens=70):
    return RNG.integers(100, 3900, tokens).tolist()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def cluster(weights):
    """A prefill worker, a decode worker by shared memory, one by TCP."""
    lease = ("--kv-lease", "8")  # what a client's leaving cannot end in time, because the reply is on its way, ends so
    with running(weights, lease, ("--kv-transport", "shm"), ("--kv-transport", "tcp")) as workers:
        yield workers


@pytest.fixture
def prefill(cluster):
    return cluster[0]


@pytest.fixture
def either(cluster):
    """A decode worker, where the way that bytes take makes no difference."""
    return cluster[1]


@pytest.fixture(params=[1, 2], ids=["shm", "tcp"])
def decode(cluster, request):
    return cluster[request.param]


def tokens_of(reply):
    return reply["choices"][0]["token_ids"]


# --- the handoff ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 70])
def test_a_divided_request_gives_what_one_process_gives(prefill, decode, tokens):
    prompt = some_prompt(tokens)
    expected = tokens_of(prefill.complete(prompt))
    params = prefill.prefill(prompt)
    computed = decode.metric("coterie:step_tokens_total")
    assert tokens_of(decode.complete(prompt, kv_transfer_params=params)) == expected
    wait_until(lambda: decode.metric("coterie:step_tokens_total") - computed >= 8, "the last step to be counted")
    assert decode.metric("coterie:step_tokens_total") - computed == 8, "the prompt was computed again"
    assert prefill.metric("coterie:kv_leases") == 0


def test_sampled_requests_draw_the_same_tokens_wherever_they_are_decoded(prefill, either):
    prompt, sampled = some_prompt(), {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    expected = tokens_of(prefill.complete(prompt, **sampled))
    assert tokens_of(either.complete(prompt, **sampled, kv_transfer_params=prefill.prefill(prompt))) == expected


def kv_of(params):
    """Bytes of the full blocks of a kept prompt, out of its owner's file."""
    data = np.fromfile(Path(FOLDER, PREFIX + params["remote_engine_id"]), np.uint8)[4096:]
    full = params["remote_block_ids"][0][: params["remote_num_tokens"] // 16]
    return data.reshape(400, -1)[full].tobytes()


def test_pulled_kv_equals_the_holders_and_what_is_computed_here(prefill, decode):
    prompt = some_prompt(100)
    theirs = prefill.prefill(prompt)
    expected = kv_of(theirs)
    decode.complete(prompt, kv_transfer_params=theirs)
    ours = decode.prefill(prompt)  # finds the pulled blocks in its cache
    assert kv_of(ours) == expected
    assert any(expected)
    prefill.complete(prompt, kv_transfer_params=ours)


def test_a_prefix_that_the_decode_worker_has_is_not_pulled_again(prefill, decode):
    prompt = some_prompt(64)
    decode.complete(prompt)
    expected = tokens_of(prefill.complete([*prompt, 5, 6, 7]))
    reply = decode.complete([*prompt, 5, 6, 7], kv_transfer_params=prefill.prefill([*prompt, 5, 6, 7]))
    assert tokens_of(reply) == expected
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_cached_tokens_of_a_divided_request_are_those_of_the_prefill_worker(prefill, either):
    prompt = some_prompt(50)
    for cached in (0, 48):  # 3 blocks of 16 the second time, wherever the decode worker has them from
        reply = either.complete(prompt, kv_transfer_params=prefill.prefill(prompt))
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_token_ids_in_give_token_ids_out(prefill, either):
    prompt, path = some_prompt(), "/inference/v1/generate"
    expected = tokens_of(prefill.complete(prompt))
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    kept = {"kv_transfer_params": {"do_remote_decode": True}, "sampling_params": {**sampling, "max_tokens": 1}}
    params = prefill.post(path, token_ids=prompt, **kept).json()["kv_transfer_params"]
    body = {"token_ids": prompt, "sampling_params": sampling, "kv_transfer_params": params, "return_token_ids": True}
    whole = either.post(path, **body).json()
    assert whole["choices"][0]["token_ids"] == expected
    assert "text" not in whole["choices"][0]
    assert (whole["prompt_token_ids"], whole["usage"]["completion_tokens"]) == (prompt, 8)
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    streamed = either.post(path, token_ids=prompt, sampling_params=sampling, **options).text
    *data, done = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
    first, *others = [json.loads(line) for line in data]
    assert done == "[DONE]"
    assert first["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk for chunk in others)
    told = [token for chunk in (first, *others) for choice in chunk["choices"] for token in choice["token_ids"]]
    assert told == expected
    assert others[-1]["usage"]["completion_tokens"] == 8


def test_kv_that_is_gone_fails_the_request_and_is_not_computed_again(prefill, decode):
    prompt = some_prompt()
    params = prefill.prefill(prompt)
    decode.complete(prompt, kv_transfer_params=params)
    computed = decode.metric("coterie:step_tokens_total")
    for stream in (False, True):
        reply = decode.post(prompt=some_prompt(), max_tokens=4, stream=stream, kv_transfer_params=params)
        assert reply.status_code == 500
        assert "no longer holds the KV" in reply.json()["error"]["message"]
    assert decode.metric("coterie:step_tokens_total") == computed
    assert decode.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 4000},
        {"logprobs": 3},
        {"temperature": -1},
        {"n": 2},
    ],
)
def test_a_refused_decode_request_leaves_the_handoff_to_whoever_sent_it(prefill, either, fields):
    prompt = some_prompt()
    params = prefill.prefill(prompt)
    right = {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
    assert either.post(**{**right, **fields}).status_code in (400, 404)
    assert prefill.metric("coterie:kv_leases") == 1
    assert either.post(**right).status_code == 200
    assert prefill.metric("coterie:kv_leases") == 0


@pytest.mark.parametrize("fields", [{"model": "other"}, {"prompt": [1, 2, 3]}])
def test_a_decode_request_that_is_not_let_in_frees_the_handoff_as_in_vllm(prefill, either, fields):
    prompt = some_prompt()
    params = prefill.prefill(prompt)
    refused = either.post(**{"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params, **fields})
    assert refused.status_code in (400, 404)
    wait_until(lambda: prefill.metric("coterie:kv_leases") == 0, "the handoff is free")


def test_prompt_tokens_that_a_router_sends_are_taken(prefill, either):
    prompt = some_prompt()
    expected = tokens_of(prefill.complete(prompt))
    params = {**prefill.prefill(prompt), "prompt_token_ids": prompt}
    assert tokens_of(either.complete("something else", kv_transfer_params=params)) == expected


def test_counts_are_those_of_the_plugin(prefill, cluster):
    prompt = some_prompt()
    reply = prefill.complete(prompt, max_tokens=6, kv_transfer_params={"coterie": "counts+ids"})["kv_transfer_params"]
    counts, output = decode_counts(reply[PROMPT_KEY]), decode_counts(reply[OUTPUT_KEY])
    assert (counts.tokens, counts.covered, output.tokens, output.covered) == (70, 70, 5, 5)
    ids = read_routed_experts(reply[OUTPUT_IDS_KEY], output.geometry)
    assert np.array_equal(count_ids(ids, 64), output.counts)
    kept = prefill.prefill(prompt)
    assert np.array_equal(decode_counts(kept[PROMPT_KEY]).counts, counts.counts)
    pulled = cluster[1].complete(prompt, kv_transfer_params={**kept, "coterie": "counts"})["kv_transfer_params"]
    assert decode_counts(pulled[PROMPT_KEY]).covered == 1  # its last token alone was forwarded there
    assert decode_counts(pulled[OUTPUT_KEY]).covered == 7


# --- breaking off --------------------------------------------------------------------------------------


def leave_early(http, worker, rng, fields):
    """Begin a request and close the connection after a moment, or after some events."""
    patience_s, events = rng.uniform(0, 0.05), rng.randrange(6)
    timeout = httpx.Timeout(30, read=max(patience_s, 0.001))
    body = {"max_tokens": 200, "stream": rng.random() < 0.7, "ignore_eos": True, **fields}
    try:
        with http.stream("POST", f"{worker.url}/v1/completions", json=body, timeout=timeout) as reply:
            for number, _ in enumerate(reply.iter_lines()):
                if number >= 2 * events:
                    return
    except httpx.HTTPError:
        pass


@pytest.mark.slow
def test_two_hundred_random_aborts_leave_nothing(cluster):
    prefill, *decodes = cluster
    rng, lock = random.Random(3), threading.Lock()
    idle = [len(worker.descriptors()) for worker in cluster]
    files = [worker.kv_files() for worker in cluster]

    def one(number):
        with lock:
            own, prompt = random.Random(rng.random()), some_prompt(24)
        if number % 3 == 0:
            keep = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            leave_early(http, prefill, own, {**keep, "stream": False})
        elif number % 3 == 1:
            leave_early(
                http, decodes[number % 2], own, {"prompt": prompt, "kv_transfer_params": prefill.prefill(prompt)}
            )
        else:
            leave_early(http, decodes[number % 2], own, {"prompt": prompt, "n": own.randrange(1, 4)})

    with httpx.Client(trust_env=False) as http, ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(200)))
    for worker, descriptors in zip(cluster, idle, strict=True):
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "coterie:kv_leases"):
            wait_until(lambda worker=worker, name=name: worker.metric(name) == 0, f"{name} to be 0")
        assert worker.metric("vllm:kv_cache_usage_perc") == 0
        wait_until(
            lambda worker=worker, most=descriptors: len(worker.descriptors()) <= most, "descriptors to be closed"
        )
    assert [worker.kv_files() for worker in cluster] == files
    prompt = some_prompt()
    expected = tokens_of(prefill.complete(prompt))
    for decode in decodes:
        assert tokens_of(decode.complete(prompt, kv_transfer_params=prefill.prefill(prompt))) == expected


def begin_endless(worker):
    """The lines of a stream that runs until the worker ends; the first has come."""
    body = {"prompt": [5, 6], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    lines = HTTP.send(HTTP.build_request("POST", f"{worker.url}/v1/completions", json=body), stream=True).iter_lines()
    next(lines)
    return lines


def test_a_killed_worker_gives_errors_and_its_memory_goes_with_the_next_start(cluster, weights):
    decode = cluster[1]
    with running(weights, ("--role", "prefill", "--kv-lease", "1")) as (doomed,):
        prompt = some_prompt()
        params = doomed.prefill(prompt)
        (file,) = doomed.kv_files()
        wait_until(lambda: doomed.metric("coterie:kv_leases") == 0, "the lease to run out")
        assert doomed.metric("vllm:kv_cache_usage_perc") == 0
        params = doomed.prefill(prompt)
        assert doomed.post(prompt=prompt, max_tokens=1, kv_transfer_params=params).status_code == 400  # its role
        params = doomed.prefill(prompt)
        lines = begin_endless(doomed)
        assert doomed.end(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(httpx.HTTPError):
            list(lines)
    refused = decode.post(prompt=prompt, max_tokens=4, kv_transfer_params=params)
    assert refused.status_code == 500
    assert "connection to the prefill worker failed" in refused.json()["error"]["message"]
    assert decode.metric("vllm:kv_cache_usage_perc") == 0
    assert file.exists()
    KvFile((1, 1), b"k" * 16).close()  # as at the next start
    assert not file.exists()


def test_a_decode_worker_killed_in_the_middle_of_a_pull_leaves_the_prefill_worker_whole(cluster, weights):
    with (
        running(weights, ("--role", "prefill", "--kv-lease", "1"), ("--kv-transport", "tcp")) as (holder, doomed),
        ThreadPoolExecutor(1) as pool,
    ):
        prompt = some_prompt(1000)
        params = holder.prefill(prompt)
        descriptors = len(holder.descriptors())
        holder.send(signal.SIGSTOP)
        reply = pool.submit(doomed.post, prompt=prompt, max_tokens=4, kv_transfer_params=params)
        wait_until(lambda: doomed.metric("vllm:num_requests_waiting") == 1, "the pull to begin")
        doomed.end(signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            reply.result(20)
        holder.send(signal.SIGCONT)
        wait_until(lambda: holder.metric("coterie:kv_leases") == 0, "the lease to run out")
        assert holder.metric("vllm:kv_cache_usage_perc") == 0
        wait_until(lambda: len(holder.descriptors()) <= descriptors, "the connection to be closed")
        again = cluster[2].complete(prompt, kv_transfer_params=holder.prefill(prompt))
        assert tokens_of(again) == tokens_of(holder.complete(prompt))


def test_ctrl_c_ends_what_runs_with_an_error_and_leaves_nothing(cluster, weights):
    with running(weights, ("--role", "decode")) as (worker,):
        (file,) = worker.kv_files()
        keep = {"do_remote_decode": True}
        assert worker.post(prompt=[5], max_tokens=1, kv_transfer_params=keep).status_code == 400  # its role
        prompt = some_prompt()
        assert len(tokens_of(worker.complete(prompt, kv_transfer_params=cluster[0].prefill(prompt)))) == 8
        lines = begin_endless(worker)
        worker.send(signal.SIGINT)
        rest = [line for line in lines if line]
        assert "the engine has stopped" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert worker.wait() == 0
    assert not file.exists()


# --- OpenAI's endpoints --------------------------------------------------------------------------------


def test_the_openai_client_is_served(prefill):
    client = openai.OpenAI(base_url=f"{prefill.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**chat)
    parts = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        == whole.choices[0].message.content
    )
    assert parts[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": parts[-1].usage.prompt_tokens_details}
    )
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    text = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
    )
    stopped = client.completions.create(
        model="tiny",
        prompt="Once upon a time",
        max_tokens=10,
        temperature=0,
        extra_body={"ignore_eos": True},
        stop=[text.choices[0].text[3:6]],
    )
    assert stopped.choices[0].text == text.choices[0].text[: text.choices[0].text.index(text.choices[0].text[3:6])]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_each_chunk_has_the_token_counts_so_far_where_they_are_wanted(prefill, kind):
    client = openai.OpenAI(base_url=f"{prefill.url}/v1", api_key="none", max_retries=0)
    asked = {
        "model": "tiny", "max_tokens": 3, "stream": True, "extra_body": {"ignore_eos": True},
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    if kind == "chat":
        parts = list(client.chat.completions.create(**asked, messages=[{"role": "user", "content": "hello"}]))
    else:
        parts = list(client.completions.create(**asked, prompt="Once upon a time"))
    opening = [0] if kind == "chat" else []  # a chat's first chunk has the role alone
    assert [part.usage.completion_tokens for part in parts] == [*opening, 1, 2, 3, 3]
    assert {part.usage.prompt_tokens for part in parts} == {parts[-1].usage.prompt_tokens}
    assert all(part.usage.total_tokens == part.usage.prompt_tokens + part.usage.completion_tokens for part in parts)


def test_several_choices_and_prompts_come_back_in_order(prefill):
    prompts = ["Once upon a time", "def main("]
    alone = [prefill.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    both = prefill.complete(prompts, n=2)
    assert [choice["text"] for choice in both["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    lengths = [len(choice["prompt_token_ids"]) for choice in both["choices"]]
    assert both["usage"]["prompt_tokens"] == lengths[0] + lengths[2]
    assert both["usage"]["completion_tokens"] == 32
    drawn = prefill.complete(prompts[0], n=4, temperature=1.5, seed=1)["choices"]
    assert len({choice["text"] for choice in drawn}) > 1


def test_text_is_tokenised_as_it_is_served(prefill):
    tokens = prefill.post("/tokenize", prompt="Once upon a time").json()
    served = prefill.complete("Once upon a time")["choices"][0]["prompt_token_ids"]
    assert tokens["tokens"] == served
    assert (tokens["count"], tokens["max_model_len"]) == (len(served), 2048)
    chat = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    rendered = prefill.post("/tokenize", messages=chat).json()["tokens"]
    assert (
        prefill.post("/v1/chat/completions", messages=chat, max_tokens=1, return_token_ids=True).json()[
            "prompt_token_ids"
        ]
        == rendered
    )


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1}, 400, "logprobs"),
        ("/v1/completions", {"prompt": [4, 10**6]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ("/v1/nothing", {}, 404, None),
    ],
)
def test_what_is_wrong_is_answered_as_vllm_does(prefill, path, fields, status, param):
    reply = prefill.post(path, **fields)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert error["type"] in ("BadRequestError", "NotFoundError")


def test_bodies_are_bounded(prefill):
    reply = HTTP.post(f"{prefill.url}/v1/completions", content=b" " * (9 << 20))
    assert reply.status_code == 413


def test_health_and_load(prefill):
    assert prefill.get("/health").status_code == 200
    assert prefill.get("/load").json() == {"server_load": 0}
