"""1P2D of real vLLM behind the gateway: equal text, nothing lost, every counter back to zero."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml
from oracle import assert_same_routing, complete, metric, transformers_counts
from scissors import cutting_gateway
from servers import ROOT, TINY

from coterie.activations import ActivationTrace
from coterie.errors import EngineError
from coterie.wire import OUTPUT_KEY, PROMPT_KEY, decode_counts
from vllm_streams import seen

CALIBRATE = ROOT / "examples" / "prompts" / "calibrate.jsonl"
SERVE = ROOT / "examples" / "prompts" / "serve.jsonl"
POLICIES = ("round_robin", "random", "least_load", "power_of_two", "domain", "locality")


def coterie(*arguments: str | Path) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "coterie", *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def trace(cluster, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    coterie("collect", "--server", cluster.prefill_urls[0], "--prompts", CALIBRATE, "--output", path,
            "--max-tokens", "16")  # fmt: skip
    return path


@pytest.fixture(scope="module")
def profile(trace):
    path = trace.with_name("profile.safetensors")
    coterie("fit", trace, "--clusters", "2", "--output", path)
    return path


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in SERVE.read_text(encoding="utf-8").splitlines()]


@contextmanager
def gateway(cluster, policy, profile, trace):
    keys = {"decode_policy": policy, "log_requests": False}
    if policy == "locality":
        keys["profile"] = str(profile)
    if policy == "domain":
        keys["trace"] = str(trace)
    member = cluster.start_gateway(keys, name=f"gateway-{policy}")
    try:
        yield member.url
    finally:
        cluster.stop_member(member)


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def text_of(url: str, row: dict, *, stream: bool, tokens: int = 16, **extra: Any) -> str:
    """The greedy answer to a prompt, or to messages, by the `openai` client."""
    options = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "stream": stream, "extra_body": extra}
    api = client(url)
    if "messages" in row:
        reply = api.chat.completions.create(messages=row["messages"], **options)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
        return reply.choices[0].message.content
    reply = api.completions.create(prompt=row["prompt"], **options)
    if stream:
        return "".join(chunk.choices[0].text for chunk in reply if chunk.choices)
    return reply.choices[0].text


def admin_url(cluster, gateway_url: str) -> str:
    """Base URL of the admin side of the gateway at `gateway_url`."""
    files = [yaml.safe_load(file.read_text()) for file in cluster.config.run_dir.glob("gateway-*.yaml")]
    port = next(file["admin_port"] for file in files if gateway_url.endswith(f":{file['port']}"))
    return f"http://127.0.0.1:{port}"


def admin(cluster, gateway_url: str, path: str) -> dict:
    return httpx.get(admin_url(cluster, gateway_url) + path, trust_env=False).json()


def metric_lines(cluster, gateway_url: str, name: str) -> list[str]:
    text = httpx.get(admin_url(cluster, gateway_url) + "/metrics", trust_env=False).text
    return [line for line in text.splitlines() if line.startswith(f"{name}{{")]


def decode_decisions(cluster, gateway_url: str) -> Counter:
    """Requests given to each decode worker, by the gateway's own metric."""
    given: Counter = Counter()
    for line in metric_lines(cluster, gateway_url, "coterie_decisions_total"):
        if 'role="decode"' in line:
            given[line.split('worker="')[1].split('"')[0]] += int(float(line.rsplit(" ", 1)[1]))
    return given


def as_chat(row: dict) -> dict:
    return row if "messages" in row else {"messages": [{"role": "user", "content": row["prompt"]}]}


def as_plain(row: dict) -> dict:
    return row if "prompt" in row else {"prompt": row["messages"][-1]["content"]}


def test_locality_gives_the_text_of_one_stock_server(cluster, profile, trace, rows):
    stock = cluster.decode_urls[1]  # runs vLLM's own connector alone, and no prefill server is involved
    chosen = rows[:: len(rows) // 24][:24]
    with gateway(cluster, "locality", profile, trace) as url:
        for number, row in enumerate(chosen):
            expected = text_of(stock, row, stream=False)
            assert text_of(url, row, stream=number % 2 == 1) == expected, row
        decisions = admin(cluster, url, "/decisions")["decisions"]
        assert {decision["reason"] for decision in decisions} == {"locality band"}
        assert all(len(decision["scores"]) == 2 for decision in decisions)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_text_of_one_stock_server(cluster, profile, trace, rows, policy):
    with gateway(cluster, policy, profile, trace) as url:
        for row in (rows[3], rows[-2]):
            for shaped in (as_plain(row), as_chat(row)):
                expected = text_of(cluster.decode_urls[0], shaped, stream=False)
                for stream in (False, True):
                    assert text_of(url, shaped, stream=stream) == expected, (policy, stream, shaped)


def test_locality_sends_the_requests_of_one_domain_to_one_worker(cluster, profile, trace, rows):
    plain = [(row["label"], as_plain(row)) for row in rows]
    with gateway(cluster, "locality", profile, trace) as url:
        for _, row in plain:  # one at a time: load never decides
            text_of(url, row, stream=False, tokens=2, ignore_eos=True)  # one that ends at once needs no decode server
        decisions = admin(cluster, url, "/decisions")["decisions"]
    where = Counter((label, made["decode"]) for (label, _), made in zip(plain, decisions[-len(plain) :], strict=True))
    labels = {label for label, _ in plain}
    majority = sum(max(where[label, f"decode-{i}"] for i in range(2)) for label in labels)
    # 8 domains on 2 workers by a coin: 8 prompts a domain would have a majority of 0.64 on average
    assert majority / len(plain) >= 0.8, where


def test_300_mixed_requests_leave_every_counter_at_zero(cluster, profile, trace, rows):
    rng = random.Random(0)
    jobs = [
        (rng.choice([as_plain, as_chat])(rng.choice(rows)), rng.random() < 0.5, rng.randint(2, 24)) for _ in range(300)
    ]
    with gateway(cluster, "locality", profile, trace) as url:
        served = [metric(decode, "vllm:request_success_total") for decode in cluster.decode_urls]  # after the probes
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda job: text_of(url, job[0], stream=job[1], tokens=job[2]), jobs))
        workers = admin(cluster, url, "/workers")["workers"]
        given = decode_decisions(cluster, url)
        lines = metric_lines(cluster, url, "coterie_answered_by_prefill_total")
        ended = sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)
    assert all(worker["requests"] == worker["tokens"] == 0 for worker in workers), workers
    engines = [
        metric(decode, "vllm:request_success_total") - before
        for decode, before in zip(cluster.decode_urls, served, strict=True)
    ]
    assert [given[f"decode-{i}"] for i in range(2)] == engines
    assert sum(engines) + ended == 300  # an output that ends with its first token needs no decode server
    wait_for_idle(cluster.prefill_urls[0])


def wait_for_idle(prefill: str, seconds: float = 45) -> None:
    """Until the prefill server holds no KV; its lease on a handoff that nobody took is 30 s."""
    deadline = time.monotonic() + seconds
    while metric(prefill, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "the prefill server still holds KV"
        time.sleep(0.5)


def test_clients_that_leave_strand_no_kv(cluster, profile, trace, rows):
    long = {"model": "tiny", "max_tokens": 600, "ignore_eos": True, "temperature": 0}

    def leave(number: int) -> bool:
        """Ask, and leave after 0.02 to 0.42 s, wherever the request is by then; whether it was finished."""
        body = {**long, "prompt": f"{number} " + as_plain(rows[number % len(rows)])["prompt"], "stream": True}
        patience = 0.02 + number / 100
        leave_at = time.monotonic() + patience
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=patience, trust_env=False) as reply:
                return all(time.monotonic() < leave_at for _ in reply.iter_raw())
        except httpx.TimeoutException:
            return False

    with gateway(cluster, "locality", profile, trace) as url:
        with ThreadPoolExecutor(8) as pool:
            assert not any(pool.map(leave, range(40)))
        deadline = time.monotonic() + 30
        while any(row["requests"] or row["tokens"] for row in admin(cluster, url, "/workers")["workers"]):
            assert time.monotonic() < deadline, "a lease was not released"
            time.sleep(0.2)
        wait_for_idle(cluster.prefill_urls[0])
        for decode in cluster.decode_urls:
            wait_for_idle(decode)


def test_a_request_that_only_decode_refuses_strands_no_kv(cluster, profile, trace, rows):
    # stream_options without stream: vLLM refuses it, and the prefill leg goes without it
    wrong = {"model": "tiny", "prompt": as_plain(rows[0])["prompt"], "stream_options": {"include_usage": True}}
    with gateway(cluster, "locality", profile, trace) as url:
        reply = httpx.post(f"{url}/v1/completions", json=wrong, timeout=60, trust_env=False)
        assert reply.status_code == 400
        assert "stream" in reply.json()["error"]["message"]
        wait_for_idle(cluster.prefill_urls[0], seconds=10)  # the lease would end after 30 s


GREEDY = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}
BROKEN = [
    ("/v1/completions", {"prompt": "The king said unto", "return_token_ids": True, **USAGE}, (1, 9)),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Count to three"}], **USAGE}, (5,)),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "你好"}], "return_token_ids": True}, (2,)),
    ("/v1/completions", {"prompt": "Es war einmal", "stop": ["no such text", "x"], **USAGE}, (7,)),
    ("/v1/completions", {"prompt": "人人生而自由，"}, (3, 4, 5)),  # characters of several tokens
]
"""Requests, and how many events come before the connection to their decode server is cut."""


def test_a_stream_whose_decode_server_is_lost_goes_on_at_the_other(cluster):
    async def ask(served, scissors, path, body):
        content, asked = b"", {"url": served.url + path, "json": {**GREEDY, **body}}
        scissors.begun.clear()
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http, http.stream("POST", **asked) as reply:
            async for part in reply.aiter_raw():
                content += part
                scissors.begun.set()
        assert reply.status_code == 200, content
        found = seen(content.split(b"\n\n")[:-1])
        for usage in found.usage:
            usage.pop("prompt_tokens_details", None)  # what was cached differs from run to run
        return found

    async def story():
        async with cutting_gateway(cluster.prefill_urls, cluster.decode_urls) as (served, scissors):
            total, cases = "coterie_continuations_total", ((*case, cut) for *case, cuts in BROKEN for cut in cuts)
            for number, (path, body, cut) in enumerate(cases):
                expected = await ask(served, scissors, path, body)
                scissors.events = cut
                found = await ask(served, scissors, path, body)
                value = served.gateway.metrics.registry.get_sample_value
                ended = sum(value(total, {"outcome": outcome}) or 0 for outcome in ("resumed", "closed"))
                assert (scissors.events, ended) == (None, number + 1)  # closed: the last token came before the cut
                assert len(found.identities) == found.closed == 1
                found.identities = expected.identities  # another id, another second
                assert found == expected, (path, body, cut)
                if found.ids:
                    fresh = complete(cluster.decode_urls[1], found.prompt + found.ids[:cut], max_tokens=24 - cut)
                    assert fresh["choices"][0]["token_ids"] == found.ids[cut:]

    asyncio.run(story())


def test_blocks_filled_from_outside_are_not_covered(cluster, rows):
    """KV that another server computed brings no counts, and never shows those of the blocks' last owner."""
    owner, borrower = cluster.decode_urls[0], cluster.prefill_urls[0]
    for number in range(12):  # every block of the borrower has counted something
        post(borrower, [100 + (number * 997 + i) % 3900 for i in range(900)])
    prompt = [200 + (i * 37) % 3500 for i in range(300)]
    params = post(owner, prompt, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    reply = post(borrower, prompt, max_tokens=9, kv_transfer_params={**params, "coterie": "counts"})
    counts, output = decode_counts(reply[PROMPT_KEY]), decode_counts(reply[OUTPUT_KEY])
    assert counts.tokens == 300
    assert counts.covered <= 32, "tokens that were loaded are counted as if they had been forwarded here"
    assert (output.tokens, output.covered) == (8, 8)


def post(url: str, prompt: list[int], **fields) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()["kv_transfer_params"]


def test_a_collected_trace_is_what_transformers_routes(trace, cluster, engine_python, tmp_path):
    loaded = ActivationTrace.load(trace)
    lines = [json.loads(line) for line in CALIBRATE.read_text(encoding="utf-8").splitlines()]
    assert list(loaded.labels) == [line["label"] for line in lines]
    plain = [i for i, line in enumerate(lines) if "prompt" in line][::6]
    ids = [
        httpx.post(
            f"{cluster.prefill_urls[0]}/tokenize", json={"model": "tiny", "prompt": lines[i]["prompt"]}, trust_env=False
        ).json()["tokens"]
        for i in plain
    ]
    counts, near = transformers_counts(engine_python, TINY, ids, tmp_path)
    for position, i in enumerate(plain):
        assert_same_routing(loaded.prefill[i], counts[position], near[position])
    assert np.array_equal(loaded.prefill_covered, loaded.prefill_tokens)


def test_a_profile_for_another_number_of_workers_is_refused_or_ignored_as_asked(cluster, trace, rows, tmp_path):
    three = tmp_path / "three.safetensors"
    coterie("fit", trace, "--clusters", "3", "--output", three)
    keys = {"decode_policy": "locality", "profile": str(three)}
    with pytest.raises(EngineError, match=r"3 centroids for 2 decode groups.*--clusters 2") as refused:
        cluster.start_gateway(keys, name="gateway-mismatch")
    assert "--on-mismatch load" in str(refused.value)
    cluster.stop_member(cluster.members("gateway")[-1])
    member = cluster.start_gateway({**keys, "on_mismatch": "load"}, name="gateway-load-only")
    try:
        assert text_of(member.url, as_plain(rows[0]), stream=False)
        (decision,) = admin(cluster, member.url, "/decisions")["decisions"][-1:]
        assert decision["reason"] != "locality band"
    finally:
        cluster.stop_member(member)


def test_the_gpu_check_passes_on_a_server_with_the_plugin_and_fails_without(cluster):
    def check(server: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts" / "gpu_check.py", "--server", server, "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    passed = check(cluster.prefill_urls[0])
    assert passed.returncode == 0, passed.stdout + passed.stderr
    rows = {row["check"]: row for row in json.loads(passed.stdout.splitlines()[-1])}
    assert rows["repeat"]["detail"].startswith("at most 0.00% of the choices moved")
    assert "remote_block_ids" in rows["handoff"]["detail"]
    failed = check(cluster.decode_urls[0])
    assert failed.returncode == 1
    assert "CountsConnector" in failed.stdout


def test_an_unknown_model_is_answered_by_the_worker_itself(cluster, profile, trace):
    with gateway(cluster, "locality", profile, trace) as url:
        reply = httpx.post(f"{url}/v1/completions", json={"model": "other", "prompt": "a"}, trust_env=False)
        assert reply.status_code == 404
        assert "other" in reply.json()["error"]["message"]
        assert [model.id for model in client(url).models.list()] == ["tiny"]


def test_the_load_generator_of_vllm_has_every_request_served(cluster, profile, trace, engine_env, tmp_path):
    with gateway(cluster, "locality", profile, trace) as url:
        command = [
            engine_env / "bin" / "vllm", "bench", "serve", "--base-url", url, "--model", "tiny", "--tokenizer", TINY,
            "--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "12", "--ignore-eos",
            "--num-prompts", "48", "--max-concurrency", "8", "--save-result", "--result-dir", tmp_path,
            "--result-filename", "result.json",
        ]  # fmt: skip
        ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-2000:]
        until("no load is counted", lambda: not any(in_use(cluster, url).values()))
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (48, 0)
    assert result["total_output_tokens"] == 48 * 12


# --- servers that fail: the cluster's supervisor starts them again ----------------------------------

FAST = {
    "decode_policy": "round_robin", "log_requests": False, "prefill_timeout_s": 10, "first_byte_timeout_s": 10,
    "idle_timeout_s": 10, "health_interval_s": 0.5, "health_timeout_s": 3, "breaker_most_open_s": 2,
}  # fmt: skip
STORY = {**GREEDY, **USAGE, "prompt": "The king said unto the people of the land", "max_tokens": 300}


def strike(member, number: signal.Signals) -> None:
    """Send a signal to a server with all of its processes."""
    os.killpg(member.process.pid, number)


def until(what: str, holds: Callable[[], bool], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def stream_story(url: str, amid: Callable[[], None] | None = None) -> list[dict]:
    """Events of a long stream; `amid` is called once 20 have come."""
    events: list[dict] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=STORY, timeout=120, trust_env=False) as reply:
        assert reply.status_code == 200, reply.read()
        lines = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        for line in lines:
            if line == "[DONE]":
                return events
            events.append(json.loads(line))
            if amid and len(events) == 20:
                amid()
    raise AssertionError(f"cut after {len(events)} events, the last {events[-1]}")


def told(events: list[dict]) -> tuple[str, dict]:
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text, {key: events[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens")}


def in_use(cluster, url: str) -> dict[str, int]:
    """Requests at each worker that is available."""
    rows = admin(cluster, url, "/workers")["workers"]
    return {row["name"]: row["requests"] for row in rows if row["state"] == "available"}


def serving(cluster, url: str):
    """The decode server that has a stream now."""
    (name,) = (name for name, held in in_use(cluster, url).items() if held and name.startswith("decode"))
    return cluster.members("decode")[int(name.removeprefix("decode-"))]


@pytest.fixture(scope="module")
def impatient(cluster):
    member = cluster.start_gateway(FAST, name="gateway-impatient")
    yield member.url
    cluster.stop_member(member)


def assert_recovered(cluster, url: str, expected: tuple[str, dict]) -> None:
    """All three servers are used again, serve the same, and hold nothing."""
    until("all workers are back", lambda: len(in_use(cluster, url)) == 3)
    for _ in range(2):  # both decode servers
        assert told(stream_story(url)) == expected
    until("no load is counted", lambda: not any(in_use(cluster, url).values()))
    for server in (*cluster.prefill_urls, *cluster.decode_urls):
        wait_for_idle(server)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_decode_server_that_dies_or_hangs_amid_a_stream_costs_no_token(cluster, impatient, fault):
    expected = told(stream_story(impatient))
    struck = []

    def amid() -> None:
        struck.append(serving(cluster, impatient))
        strike(struck[0], fault)

    try:
        assert told(stream_story(impatient, amid)) == expected
        assert told(stream_story(impatient)) == expected  # the next one is sent to the other at once
    finally:
        if fault is signal.SIGSTOP:
            strike(struck[0], signal.SIGCONT)
    assert_recovered(cluster, impatient, expected)


def test_a_decode_server_that_hangs_before_a_request_is_sent_costs_a_wait(cluster, impatient):
    def waits() -> int:
        lines = metric_lines(cluster, impatient, "coterie_retries_total")
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if 'role="decode"' in line)

    expected, before = told(stream_story(impatient)), waits()
    victim = cluster.members("decode")[0]
    strike(victim, signal.SIGSTOP)
    try:
        for _ in range(2):
            assert told(stream_story(impatient)) == expected
    finally:
        strike(victim, signal.SIGCONT)
    assert waits() > before
    assert_recovered(cluster, impatient, expected)


def test_with_the_only_prefill_server_dead_requests_get_a_clear_error_and_streams_go_to_their_end(cluster, impatient):
    expected = told(stream_story(impatient))
    (prefill,), refused = cluster.members("prefill"), []

    def amid() -> None:
        strike(prefill, signal.SIGKILL)

        def ask() -> None:
            refused.append(httpx.post(f"{impatient}/v1/completions", json=STORY, timeout=60, trust_env=False))

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()

    assert told(stream_story(impatient, amid)) == expected  # its KV was fetched before
    assert len(refused) == 3
    for reply in refused:
        assert reply.status_code in (502, 503), reply.text
        assert reply.json()["error"]["message"]
    assert_recovered(cluster, impatient, expected)
