"""The whole way on real computation: collect, fit, and 1P2D of embedded engines behind the gateway."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from coterie.cli.collect import collect
from coterie.cli.fit import fit
from coterie.up.cluster import Cluster
from coterie.up.config import load_cluster_config
from coterie.up.processes import State
from waiting import wait_until

TINY = Path(__file__).parents[2] / "models" / "coterie-tiny"
PROMPTS = (
    "Once upon a time",
    "def main(args):\n    ",
    "The king said unto",
    "SELECT name FROM",
    "Es war einmal",
    "Il y a",
)
HTTP = httpx.Client(timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    pool = 'args: ["--kv-blocks", "200", "--kv-lease", "8"]'
    (folder / "cluster.yaml").write_text(f"""
model: {TINY}
served_model_name: tiny
engine: embedded
prefill: {{count: 1, {pool}}}
decode: {{count: 2, {pool}}}
run_dir: run
""")
    with HTTP, Cluster(load_cluster_config(folder / "cluster.yaml", engine_env=Path("/nowhere"))) as running:
        yield running


def run(command, *arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def trace(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    lines = [json.dumps({"prompt": f"{prompt} {i}", "label": prompt[:3]}) for prompt in PROMPTS for i in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    run(collect, "--server", cluster.prefill_urls[0], "--prompts", folder / "prompts.jsonl",
        "--output", folder / "trace.safetensors", "--max-tokens", 4)  # fmt: skip
    return folder / "trace.safetensors"


@pytest.fixture(scope="module")
def profile(trace):
    path = trace.with_name("profile.safetensors")
    run(fit, trace, "--clusters", 2, "--output", path)
    return path


def answer(url, prompt, *, stream=False):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": stream}
    reply = HTTP.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()["choices"][0]["text"]
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def metric(url, name):
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture(scope="module")
def expected(cluster):
    """By one process alone."""
    return {prompt: answer(cluster.decode_urls[1], prompt) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def least_load(cluster):
    keys = {"decode_policy": "least_load", "log_requests": False, "port": 0, "admin_port": 0}
    return cluster.start_gateway(keys, name="least-load")


@pytest.fixture(scope="module")
def locality(cluster, profile):
    keys = {"decode_policy": "locality", "profile": str(profile), "log_requests": False}
    return cluster.start_gateway(keys, name="locality")


@pytest.fixture(params=["least_load", "locality"])
def gateway(request):
    return request.getfixturevalue(request.param)


def assert_nothing_is_held(cluster):
    names = ("vllm:num_requests_running", "coterie:kv_leases", "vllm:kv_cache_usage_perc")
    urls = (*cluster.prefill_urls, *cluster.decode_urls)
    wait_until(lambda: not any(metric(url, name) for url in urls for name in names))


def test_decode_workers_are_seen_to_fetch_kv(least_load):
    rows = HTTP.get(f"{least_load.admin_url}/workers").json()["workers"]
    assert [row["transfer"] for row in rows] == [None, *[{"fetches": True, "on_lost": None}] * 2]


def test_every_policy_gives_the_text_of_one_process(cluster, gateway, expected):
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda n: answer(gateway.url, PROMPTS[n % 6], stream=n % 2 == 0), range(24)))
    assert texts == [expected[PROMPTS[n % 6]] for n in range(24)]
    decisions = HTTP.get(f"{gateway.admin_url}/decisions").json()["decisions"]
    assert {decision["decode"] for decision in decisions} == {"decode-0", "decode-1"}
    if "locality" in gateway.process.spec.name:
        assert Counter(decision["reason"] for decision in decisions) == {"locality band": 24}
    assert_nothing_is_held(cluster)


def test_the_next_turn_of_a_conversation_pulls_only_what_its_worker_does_not_hold(cluster):
    keys = {"decode_policy": "round_robin", "log_requests": False, "port": 0, "admin_port": 0}
    gateway = cluster.start_gateway(keys, name="sessions")
    found = {}
    for session in (None, "a"):
        history = f"Conversation {session}: " + "it was a bright cold day in April, " * 4
        headers = {} if session is None else {"x-coterie-session": session}
        before = sum(metric(url, "vllm:prefix_cache_hits_total") for url in cluster.decode_urls)
        for _ in range(3):
            body = {"model": "tiny", "prompt": history, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            reply = HTTP.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
            history += reply.json()["choices"][0]["text"]
        found[session] = sum(metric(url, "vllm:prefix_cache_hits_total") for url in cluster.decode_urls) - before
    # Round robin comes back to the first worker at the third turn, which then has the first prompt and output; with a
    # session both later turns find all that came before them.
    assert found["a"] > 1.5 * found[None] > 0


def test_a_request_that_the_decode_worker_refuses_leaves_no_lease(cluster, least_load):
    reply = HTTP.post(f"{least_load.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 4000})
    assert reply.status_code == 400
    assert "shorten the prompt or lower max_tokens" in reply.json()["error"]["message"]
    assert_nothing_is_held(cluster)
    wait_until(lambda: metric(least_load.admin_url, "coterie_handoffs_released_total"))
    assert 'outcome="failed"' not in HTTP.get(f"{least_load.admin_url}/metrics").text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_output_that_ends_with_its_first_token_needs_no_decode_worker(cluster, least_load, path):
    said = {"messages": [{"role": "user", "content": "Count"}]} if "chat" in path else {"prompt": PROMPTS[0]}
    body = {"model": "tiny", **said, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    direct = cluster.decode_urls[0] + path
    first = HTTP.post(direct, json=body).json()["choices"][0]["token_ids"][0]
    usage = {"stream_options": {"include_usage": True}}
    for ending in ({"max_tokens": 1}, {"stop_token_ids": [first]}):
        whole = HTTP.post(direct, json={**body, **ending}).json()
        streamed = HTTP.post(direct, json={**body, **ending, "stream": True, **usage}).text
        served = sum(metric(url, "vllm:request_success_total") for url in cluster.decode_urls)
        released = metric(least_load.admin_url, "coterie_handoffs_released_total")
        got = HTTP.post(least_load.url + path, json={**body, **ending}).json()
        events = HTTP.post(least_load.url + path, json={**body, **ending, "stream": True, **usage}).text
        assert got["choices"] == whole["choices"]
        assert as_said(events) == as_said(streamed)
        assert_nothing_is_held(cluster)
        assert sum(metric(url, "vllm:request_success_total") for url in cluster.decode_urls) == served
        kept = 0 if "max_tokens" in ending else 2
        assert metric(least_load.admin_url, "coterie_handoffs_released_total") - released == kept


def as_said(events):
    """The events of a stream, but for what differs from one request to the next."""
    *data, done = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(line) for line in data]
    for chunk in chunks:
        del chunk["id"], chunk["created"]
        chunk.pop("kv_transfer_params", None)
        chunk.get("usage", {}).pop("prompt_tokens_details", None)  # what was cached where
    return chunks


def test_a_first_token_may_not_end_an_output_that_must_go_on(cluster, least_load):
    body = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 9, "temperature": 0, "return_token_ids": True}
    first = HTTP.post(f"{cluster.decode_urls[0]}/v1/completions", json=body).json()["choices"][0]["token_ids"][0]
    limited = {**body, "stop_token_ids": [first], "min_tokens": 4}
    expected = HTTP.post(f"{cluster.decode_urls[0]}/v1/completions", json=limited).json()["choices"]
    assert len(expected[0]["token_ids"]) >= 4
    assert HTTP.post(f"{least_load.url}/v1/completions", json=limited).json()["choices"] == expected


def test_token_ids_are_answered_by_both_roles_as_by_one_process(cluster, least_load):
    body = {"token_ids": list(range(200, 290)), "sampling_params": {"max_tokens": 6, "temperature": 0}}
    path = "/inference/v1/generate"
    expected = HTTP.post(cluster.decode_urls[1] + path, json=body).json()["choices"]
    prefilled = metric(cluster.prefill_urls[0], "vllm:request_success_total")
    for stream in (False, True):
        reply = HTTP.post(least_load.url + path, json={**body, "stream": stream})
        chunks = as_tokens(reply.text) if stream else reply.json()["choices"][0]["token_ids"]
        assert chunks == expected[0]["token_ids"]
    assert metric(cluster.prefill_urls[0], "vllm:request_success_total") - prefilled == 2
    assert_nothing_is_held(cluster)


def as_tokens(events):
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]


def test_cached_tokens_are_told_as_the_prefill_worker_counted_them(least_load):
    body = {"model": "tiny", "prompt": [7, *range(300, 349)], "max_tokens": 4, "temperature": 0}
    for cached in (0, 48):  # 50 tokens are 3 full blocks of 16; the first time the decode worker fetched them all
        usage = HTTP.post(f"{least_load.url}/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}


def test_clients_that_leave_at_any_moment_leave_nothing_behind(cluster, locality):
    rng = random.Random(1)
    for _ in range(30):
        body = {"model": "tiny", "prompt": rng.choice(PROMPTS), "max_tokens": 200, "ignore_eos": True, "stream": True}
        timeout = httpx.Timeout(20, read=rng.uniform(0.001, 0.03))
        with (
            contextlib.suppress(httpx.ReadTimeout),
            HTTP.stream("POST", f"{locality.url}/v1/completions", json=body, timeout=timeout) as reply,
        ):
            next(reply.iter_lines())
    assert_nothing_is_held(cluster)


def stream(url, number):
    """How a request that takes a while ended: whole, with an error event, or with an HTTP error."""
    body = {"model": "tiny", "prompt": f"{PROMPTS[number % 6]} {number}", "max_tokens": 150, "ignore_eos": True}
    try:
        reply = HTTP.post(f"{url}/v1/completions", json={**body, "stream": True})
    except httpx.TransportError:
        return "error"
    if reply.status_code != 200 or '"error"' in reply.text:
        return "error"
    assert reply.text.endswith("data: [DONE]\n\n")
    return "whole"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_comes_back_and_nothing_is_held(cluster, least_load, expected, role):
    victim, decoding = cluster.members(role)[0], cluster.decode_urls[0]
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(stream, least_load.url, number) for number in range(12)]
        wait_until(lambda: metric(decoding, "vllm:num_requests_running") > 2)
        os.killpg(victim.process.pid, signal.SIGKILL)
        later = [pool.submit(stream, least_load.url, number) for number in range(12, 16)]
        ends = Counter(one.result(30) for one in (*streams, *later))
    if role == "decode":
        assert ends == {"whole": 16}  # they went on at the other one
    else:
        assert ends["error"] > 0  # there is no other
    wait_until(lambda: victim.process.restarts > 0 and victim.process.state is State.READY)
    wait_until(lambda: all(row["available"] for row in HTTP.get(f"{least_load.admin_url}/workers").json()["workers"]))
    wait_until(lambda: stream(least_load.url, 1) == "whole")
    assert_nothing_is_held(cluster)
    assert [answer(least_load.url, prompt) for prompt in PROMPTS] == [expected[prompt] for prompt in PROMPTS]


def state_of(gateway, name):
    rows = HTTP.get(f"{gateway.admin_url}/workers").json()["workers"]
    return next((row["state"] for row in rows if row["name"] == name), "gone")


@pytest.mark.slow  # in one process: tests/gateway/test_changes.py
def test_workers_come_and_go_under_load_and_every_stream_is_whole(cluster, trace, profile):
    keys = {"decode_policy": "locality_refit", "profile": str(profile), "log_requests": False, "health_interval_s": 0.2}
    gateway = cluster.start_gateway({**keys, "port": 0, "admin_port": 0}, name="changing")
    admin, second = gateway.admin_url, cluster.decode_urls[1]
    file = cluster.config.run_dir / "changing.yaml"
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(stream, gateway.url, number) for number in range(36)]
        assert HTTP.delete(f"{admin}/workers/decode-1").json()["state"] == "leaving"
        wait_until(lambda: state_of(gateway, "decode-1") == "gone")
        assert HTTP.post(f"{admin}/workers", json={"role": "decode", "url": second}).status_code == 201
        wait_until(lambda: state_of(gateway, "decode-1") == "available")
        HTTP.post(f"{admin}/workers/decode-0/drain")
        wait_until(lambda: state_of(gateway, "decode-0") == "drained")
        HTTP.post(f"{admin}/workers/decode-0/undrain")
        other = profile.with_name("other.safetensors")
        run(fit, trace, "--clusters", 2, "--seed", 1, "--output", other)
        good = file.read_text()
        file.write_text(good.replace(str(profile), str(other)))
        assert HTTP.post(f"{admin}/reload").json()["policies"] == ["decode"]
        file.write_text(good.replace(str(profile), "/nowhere"))
        assert HTTP.post(f"{admin}/reload").status_code == 409
        assert Counter(one.result(60) for one in streams) == {"whole": 36}
    assert HTTP.get(f"{admin}/config").json()["profile"] == str(other)
    wait_until(lambda: metric(admin, "coterie_in_flight_requests") == 0)
    assert_nothing_is_held(cluster)
