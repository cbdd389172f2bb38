"""A cluster of embedded engines whose experts are in servers of their own."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from coterie.calibration.prompts import Prompt
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import Status
from coterie.up.cluster import Cluster
from coterie.up.config import load_cluster_config
from coterie.up.experts_demo import DemoOptions, ExpertsDemo, phases
from running_monitor import until

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "models" / "coterie-tiny"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "cluster.yaml").write_text(f"""
model: {TINY}
served_model_name: tiny
engine: embedded
prefill: {{count: 1, args: ["--kv-blocks", "100"]}}
decode: {{count: 1, args: ["--kv-blocks", "100"]}}
experts: {{servers: 2, replicas: 2}}
gateway: {{decode_policy: least_load}}
run_dir: {folder / "run"}
""")
    with Cluster(load_cluster_config(folder / "cluster.yaml", engine_env=Path("/nowhere"))) as running:
        yield running


def answer(cluster):
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{cluster.gateway_url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def serving(cluster):
    return sorted(
        row.name for row in ask(cluster.monitor_url, "GET", "/status", Status).servers if row.state == "serving"
    )


def test_the_demo_kills_and_adds_a_server_and_no_request_fails(cluster):
    prompts = [Prompt(f"test:{number}", "", f"Once upon a time {number}", None) for number in range(4)]
    options = DemoOptions(kill_s=1.0, grow_s=5.0, end_s=9.0, streams=2, max_tokens=8)
    demo = ExpertsDemo(cluster, prompts, options)
    told = []
    demo.tell = lambda at_s, text: told.append((at_s, text))
    asyncio.run(demo.run())
    assert demo.load.seen.errors == []
    victim = next(text for _, text in told if text.startswith("KILLED")).split()[1].rstrip(":")
    assert any(text.startswith("STARTING experts-2, with the experts of experts-") for _, text in told)
    found = phases(demo.marks, demo.ended_s, demo.load.seen)
    assert [phase.name for phase in found][:2] == ["2 servers", f"{victim} is killed"]
    assert {f"{victim} serves", "experts-2 serves"} <= {phase.name for phase in found}
    assert sum(phase.finished for phase in found) > 0
    cluster.stop_member(cluster.members("experts")[-1])
    until(lambda: serving(cluster) == ["experts-0", "experts-1"])


def test_a_server_that_is_killed_is_started_again_and_answers_stay_the_same(cluster):
    text = answer(cluster)
    assert serving(cluster) == ["experts-0", "experts-1"]
    victim = cluster.members("experts")[0].process
    before = victim.restarts
    os.killpg(victim.pid, signal.SIGKILL)
    assert answer(cluster) == text
    until(lambda: victim.restarts > before and serving(cluster) == ["experts-0", "experts-1"])
    assert answer(cluster) == text


def test_a_server_can_be_added_and_stopped_while_others_serve(cluster):
    text = answer(cluster)
    added = cluster.start_expert_server("experts-2", "0-31")
    until(lambda: "experts-2" in serving(cluster))
    assert answer(cluster) == text
    cluster.stop_member(added)
    until(lambda: serving(cluster) == ["experts-0", "experts-1"])
    assert answer(cluster) == text
