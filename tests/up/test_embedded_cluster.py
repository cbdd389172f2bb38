"""The whole way on real computation: collect, fit, and 1P2D of embedded engines behind the gateway."""

from __future__ import annotations

import json
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

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-moe"
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
    pool = 'args: ["--kv-blocks", "200"]'
    (folder / "cluster.yaml").write_text(f"""
model: {TINY}
served_model_name: tiny
engine: embedded
prefill: {{count: 1, {pool}}}
decode: {{count: 2, {pool}}}
run_dir: run
""")
    with Cluster(load_cluster_config(folder / "cluster.yaml", engine_env=Path("/nowhere"))) as running:
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


@pytest.mark.parametrize("policy", ["least_load", "locality"])
def test_every_policy_gives_the_text_of_one_process(cluster, profile, expected, policy):
    keys = {"decode_policy": policy, "log_requests": False}
    member = cluster.start_gateway({**keys, "profile": str(profile)} if policy == "locality" else keys, name=policy)
    try:
        with ThreadPoolExecutor(6) as pool:
            texts = list(pool.map(lambda n: answer(member.url, PROMPTS[n % 6], stream=n % 2 == 0), range(24)))
        assert texts == [expected[PROMPTS[n % 6]] for n in range(24)]
        decisions = HTTP.get(f"{member.admin_url}/decisions").json()["decisions"]
        if policy == "locality":
            assert Counter(decision["reason"] for decision in decisions) == {"locality band": 24}
        assert {decision["decode"] for decision in decisions} == {"decode-0", "decode-1"}
    finally:
        cluster.stop_member(member)
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        assert metric(url, "vllm:num_requests_running") == metric(url, "coterie:kv_leases") == 0
        assert metric(url, "vllm:kv_cache_usage_perc") == 0


def test_a_request_that_the_decode_worker_refuses_leaves_no_lease(cluster):
    member = cluster.start_gateway({"log_requests": False}, name="refusing")
    try:
        reply = HTTP.post(f"{member.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 4000})
        assert reply.status_code == 400
        assert "shorten the prompt or lower max_tokens" in reply.json()["error"]["message"]
    finally:
        cluster.stop_member(member)  # waits for releases
    assert metric(cluster.prefill_urls[0], "coterie:kv_leases") == 0
