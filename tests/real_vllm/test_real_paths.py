"""Which servers a request needs, on real vLLM: what the prefill server answers by itself, and what is handed over."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from oracle import metric

from coterie.up.cluster import Cluster

HTTP = httpx.Client(timeout=120, trust_env=False)
GENERATE = "/inference/v1/generate"
SAID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The king said unto"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Count to three"}]},
    GENERATE: {"token_ids": list(range(200, 290))},
}


@contextmanager
def running_gateway(cluster, name, **keys):
    keys = {"decode_policy": "round_robin", "log_requests": False, "port": 0, "admin_port": 0, **keys}
    member = cluster.start_gateway(keys, name=name)
    try:
        yield member
    finally:
        cluster.stop_member(member)


@pytest.fixture(scope="module")
def gateway(cluster):
    with HTTP, running_gateway(cluster, "paths") as member:
        yield member


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A greedy request whose answer names its tokens; `fields` are of sampling, or of the reply's form."""
    form = {name: fields.pop(name) for name in ("stream", "stream_options") if name in fields}
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    asked = {"model": "tiny", **SAID[path], "return_token_ids": True, **form}
    return {**asked, "sampling_params": sampling} if path == GENERATE else {**asked, **sampling}


def ask(url: str, path: str, **fields: Any) -> httpx.Response:
    reply = HTTP.post(url + path, json=body(path, **fields))
    assert reply.status_code == 200, reply.text
    return reply


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, but for what differs from one request to the next."""
    *data, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in data]
    for chunk in chunks:
        for name in ("id", "request_id", "created", "model"):
            chunk.pop(name, None)
        (chunk.get("usage") or {}).pop("prompt_tokens_details", None)  # what was cached where
    return [{name: value for name, value in chunk.items() if value is not None} for chunk in chunks]


def counted(gateway: Any, name: str) -> float:
    lines = HTTP.get(f"{gateway.admin_url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def decoded(cluster: Cluster) -> float:
    """Requests that decode servers have answered."""
    return sum(metric(url, "vllm:request_success_total") for url in cluster.decode_urls)


def wait_until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + 10  # vLLM's lease would end after 30 s
    while any(metric(url, "vllm:kv_cache_usage_perc") for url in (*cluster.prefill_urls, *cluster.decode_urls)):
        assert time.monotonic() < deadline, "a server still holds KV"
        time.sleep(0.2)


def test_a_decode_server_is_seen_to_fetch_kv_and_to_fail_where_it_cannot(gateway):
    rows = HTTP.get(f"{gateway.admin_url}/workers").json()["workers"]
    assert [row["transfer"] for row in rows] == [None, *[{"fetches": True, "on_lost": "fail"}] * 2]


@pytest.mark.parametrize("path", SAID)
def test_an_output_that_ends_with_its_first_token_is_told_as_one_server_tells_it(cluster, gateway, path):
    stock, usage = cluster.decode_urls[0], {"stream_options": {"include_usage": True}}
    first = ask(stock, path).json()["choices"][0]["token_ids"][0]
    for ending in ({"max_tokens": 1}, {"stop_token_ids": [first]}):
        expected = ask(stock, path, **ending).json()["choices"]
        streamed = events(ask(stock, path, **ending, stream=True, **usage))
        before = decoded(cluster)
        released = counted(gateway, 'coterie_handoffs_released_total{outcome="released"}')
        assert ask(gateway.url, path, **ending).json()["choices"] == expected
        assert events(ask(gateway.url, path, **ending, stream=True, **usage)) == streamed
        wait_until_idle(cluster)
        kept = 0 if "max_tokens" in ending else 2  # vLLM keeps the KV of a prompt whose first token ended all, too
        assert decoded(cluster) == before
        assert counted(gateway, 'coterie_handoffs_released_total{outcome="released"}') - released == kept


@pytest.mark.parametrize("path", SAID)
def test_a_first_token_may_not_end_an_output_that_must_go_on(cluster, gateway, path):
    first = ask(cluster.decode_urls[0], path).json()["choices"][0]["token_ids"][0]
    limited = {"stop_token_ids": [first], "min_tokens": 4}
    expected = ask(cluster.decode_urls[0], path, **limited).json()["choices"][0]["token_ids"]
    assert len(expected) >= 4
    assert ask(gateway.url, path, **limited).json()["choices"][0]["token_ids"] == expected


def test_token_ids_are_answered_by_both_servers(cluster, gateway):
    expected = ask(cluster.decode_urls[0], GENERATE).json()["choices"][0]["token_ids"]
    prefilled = metric(cluster.prefill_urls[0], "vllm:request_success_total")
    assert ask(gateway.url, GENERATE).json()["choices"][0]["token_ids"] == expected
    chunks = events(ask(gateway.url, GENERATE, stream=True))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
    assert metric(cluster.prefill_urls[0], "vllm:request_success_total") - prefilled == 2
    wait_until_idle(cluster)


def test_cached_tokens_are_told_as_the_prefill_server_counted_them(gateway):
    asked = {"model": "tiny", "prompt": [7, *range(300, 399)], "max_tokens": 4, "temperature": 0}
    for cached in (0, 96):  # 100 tokens are 3 full blocks of 32; the first time the decode server fetched them all
        usage = HTTP.post(f"{gateway.url}/v1/completions", json=asked).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_paths_that_are_not_split_are_answered_by_the_decode_server(cluster, gateway, path):
    said = {"input": "Count"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Count"}]}
    limit = {"max_output_tokens": 5} if path == "/v1/responses" else {"max_tokens": 5}
    reply = HTTP.post(gateway.url + path, json={"model": "tiny", "temperature": 0, **said, **limit})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["output_tokens"] == 5
    assert counted(gateway, 'coterie_not_split_total{reason="path"}') >= 1


def test_a_short_prompt_and_a_long_one_give_the_same_split_or_not(cluster):
    with running_gateway(cluster, "short-prompts", split_above_bytes=30) as gateway:
        for prompt, alone in (("The king", 1), ("The king said unto his men, and they", 0)):
            asked = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
            expected = HTTP.post(f"{cluster.decode_urls[0]}/v1/completions", json=asked).json()["choices"]
            before = counted(gateway, "coterie_not_split_total{")
            assert HTTP.post(f"{gateway.url}/v1/completions", json=asked).json()["choices"] == expected
            assert counted(gateway, "coterie_not_split_total{") - before == alone
