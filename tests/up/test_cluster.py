"""A cluster of stand-in engines: start, order, loss, stop, what is left behind."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from coterie.errors import ConfigError, EngineError
from coterie.up.cluster import Cluster
from coterie.up.config import ClusterConfig, PoolConfig
from coterie.up.ports import PortChooser
from waiting import wait_until

ENGINE = f"""#!{sys.executable} -IS
import http.server, os, sys
if "--broken" in sys.argv:
    sys.exit("unrecognized arguments: --broken")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = repr((sys.argv, dict(os.environ))).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def config(tmp_path):
    program = tmp_path / "env" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(ENGINE)
    program.chmod(0o755)
    return ClusterConfig("/model", "tiny", PoolConfig(1), PoolConfig(2), tmp_path / "env", tmp_path / "run")


def changed(config, **changes):
    return dataclasses.replace(config, **changes)


def asked(url):
    """Command line and environment of the engine behind a URL."""
    return eval(httpx.get(f"{url}/health", trust_env=False).text)


def test_all_engines_run_and_nothing_is_left_after_the_block(config):
    with Cluster(config) as cluster:
        assert len(cluster.prefill_urls) == 1
        assert len(cluster.decode_urls) == 2
        assert len({*cluster.prefill_urls, *cluster.decode_urls}) == 3
        assert [member.status().state for member in cluster.members()] == ["ready"] * 3
        pids = [member.process.pid for member in cluster.members()]
        with pytest.raises(ConfigError, match="runs no gateway"):
            _ = cluster.gateway_url
    assert [member.status().state for member in cluster.members()] == ["stopped"] * 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
    for url in (*cluster.prefill_urls, *cluster.decode_urls):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, trust_env=False)


def test_prefill_runs_the_plugin_and_decode_the_stock_connector(config):
    with Cluster(changed(config, decode=PoolConfig(1, ("--seed", "7"), {"OMP_NUM_THREADS": "2"}))) as cluster:
        prefill, prefill_env = asked(cluster.prefill_urls[0])
        decode, decode_env = asked(cluster.decode_urls[0])
    assert prefill[1:5] == ["serve", "/model", "--served-model-name", "tiny"]
    assert "CountsConnector" in prefill[prefill.index("--kv-transfer-config") + 1]
    assert "CountsConnector" not in decode[decode.index("--kv-transfer-config") + 1]
    assert decode[-2:] == ["--seed", "7"]
    assert (prefill_env["OMP_NUM_THREADS"], decode_env["OMP_NUM_THREADS"]) == ("1", "2")
    ports = {env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for env in (prefill_env, decode_env)}
    assert len(ports) == 2


def test_a_killed_engine_comes_back_at_the_same_url(config):
    with Cluster(config) as cluster:
        member = cluster.members("decode")[1]
        os.killpg(member.process.pid, signal.SIGKILL)
        wait_until(lambda: member.status().restarts == 1 and member.status().state == "ready", "the restart")
        assert asked(member.url)
        assert [other.status().restarts for other in cluster.members()] == [0, 0, 1]


def test_a_stopped_member_is_gone_and_stays_so(config):
    with Cluster(config) as cluster:
        member = cluster.members("decode")[0]
        cluster.stop_member(member)
        assert member.status().state == "stopped"
        assert member not in cluster.members()
        assert len(cluster.decode_urls) == 1


def test_an_engine_that_does_not_start_fails_the_cluster_with_its_log(config):
    cluster = Cluster(changed(config, decode=PoolConfig(1, ("--broken",))))
    with pytest.raises(EngineError, match=r"(?s)decode-0 ended before it was ready.*unrecognized arguments: --broken"):
        cluster.__enter__()
    assert [member.status().pid for member in cluster.members()] == [None, None]


def test_a_gateway_that_does_not_start_shows_its_log(config):
    with Cluster(config) as cluster, pytest.raises(EngineError, match=r"(?s)gateway ended before.*no-such\.profile"):
        cluster.start_gateway({"decode_policy": "locality", "profile": "/no-such.profile"})


def test_a_missing_environment_is_named_with_its_remedy(config):
    cluster = Cluster(changed(config, engine_env=Path("/nowhere")))
    with pytest.raises(ConfigError, match="no vLLM in /nowhere; run `make vllm-env`"):
        cluster.__enter__()
    assert cluster.members() == []


def test_two_clusters_do_not_share_a_run_dir(config):
    with (
        Cluster(config),
        pytest.raises(ConfigError, match="in use by another cluster"),
        Cluster(changed(config, engine_env=Path("/nowhere"))),
    ):
        pass


def test_a_named_port_that_is_taken_is_an_error_before_anything_starts(config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = Cluster(changed(config, engine_port=port))
        with pytest.raises(ConfigError, match=f"ports: engines: port {port} is not free"):
            cluster.__enter__()
    assert cluster.members() == []


def test_named_ports_are_consecutive_and_free_ones_differ():
    chooser = PortChooser(start=os.getpid())
    free = chooser.ports(0, 5, "x")
    assert len(set(free)) == 5
    first = chooser.ports(0, 1, "x")[0]
    with pytest.raises(ConfigError, match="not free"):
        chooser.ports(first, 1, "x")


def test_processes_that_start_together_choose_other_ports():
    given = [chosen for pid in range(7000, 7010) for chosen in PortChooser(start=pid).ports(0, 20, "x")]
    assert len(set(given)) == len(given)


@pytest.fixture
def up(config, tmp_path):
    """Command line of `coterie up` for one prefill and one decode engine."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: ./model\nserved_model_name: tiny\nprefill: {count: 1}\ndecode: {count: 1}\n"
        "engine_env: env\nrun_dir: run\n"
    )
    return [sys.executable, "-m", "coterie", "up", str(file), "--json"]


def test_nothing_survives_a_killed_coterie_up(up):
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as parent:
        states = []
        while [state["state"] for state in states] != ["ready", "ready"]:
            states = json.loads(parent.stdout.readline())
        parent.kill()
    for state in states:
        wait_until(lambda pid=state["pid"]: not Path(f"/proc/{pid}").exists(), "the end of the engines")


def test_sigterm_stops_coterie_up_with_status_0(up):
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as parent:
        while '"ready", ' not in (line := parent.stdout.readline()) or "starting" in line:
            pass
        parent.terminate()
        last = json.loads(parent.stdout.read().splitlines()[-1])
    assert parent.returncode == 0
    assert [state["state"] for state in last] == ["stopped", "stopped"]
