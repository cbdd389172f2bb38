"""Server processes that clients of another host reach by NIXL: killed, suspended, and asked to end in a call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from coterie.errors import EngineError
from coterie.experts.client import Patience, connections, nixl_tries
from coterie.experts.client.model_experts import ExpertsConfig, remote_experts
from coterie.experts.transport.nixl import NixlClient
from coterie.modeling.expert_tensors import read_expert_model
from expert_processes import expert_server
from network_hosts import two_hosts
from running_monitor import running_monitor, until
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.usefixtures("nixl", "elsewhere")
DEADLINE_S = 60
TESTS, INSIDE = Path(__file__).parents[1], Path(__file__).parent / "inside"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module", params=["posix,sysv,cma,self,tcp", "tcp"], ids=["shm", "tcp"])
def way(request):
    """What UCX may use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", request.param)
        yield


@pytest.fixture
def elsewhere(monkeypatch):
    """No server is on this host."""
    monkeypatch.setattr(connections, "_is_here", lambda _: False)


@pytest.fixture(scope="module")
def monitor(checkpoint, nixl, way):
    """It knows a server that has all experts, and takes NIXL."""
    with running_monitor() as url, expert_server(checkpoint, "--name", "a", "--monitor", url, "--nixl"):
        yield url


@pytest.fixture
def b(checkpoint, monitor):
    """Another such server."""
    with expert_server(checkpoint, "--name", "b", "--monitor", monitor, "--nixl") as server:
        assert server.config["nixl"]
        yield server


@contextlib.contextmanager
def client(checkpoint, monitor, **patience):
    with remote_experts(checkpoint, ExpertsConfig(monitor, "test", patience=Patience(**patience))) as remote:
        model = read_expert_model(checkpoint)
        yield lambda: remote.start(0, *inputs(model))


def inputs(model, tokens=40):
    rng, geometry = np.random.default_rng(tokens), model.geometry
    ids = rng.permuted(np.tile(np.arange(geometry.experts), (tokens, 1)), axis=1)[:, : geometry.top_k]
    return rng.standard_normal((tokens, model.hidden), np.float32), ids, rng.random(ids.shape, np.float32)


def finished(started):
    return started.finish(time.monotonic() + DEADLINE_S)


@pytest.fixture
def expected(checkpoint, monitor, monkeypatch):
    """By shared memory."""
    with monkeypatch.context() as patch, client(checkpoint, monitor) as start:
        patch.setattr(connections, "_is_here", lambda _: True)
        return finished(start())


def computed_by(server):
    return server.get("/load").json()["requests"]["computed"]


def test_a_replica_that_is_killed_in_a_call_costs_no_bit(checkpoint, monitor, b, expected):
    with client(checkpoint, monitor, reply_s=60) as start:
        np.testing.assert_array_equal(finished(start()), expected)
        os.kill(b.process.pid, signal.SIGSTOP)  # so that it has the request, and cannot reply
        started = start()
        b.process.kill()
        np.testing.assert_array_equal(finished(started), expected)


def test_a_replica_that_is_stopped_costs_no_bit_and_is_asked_again_when_it_goes_on(checkpoint, monitor, b, expected):
    with client(checkpoint, monitor, reply_s=0.05, probe_s=0.01) as start:
        os.kill(b.process.pid, signal.SIGSTOP)
        for _ in range(3):
            np.testing.assert_array_equal(finished(start()), expected)
        os.kill(b.process.pid, signal.SIGCONT)
        before = computed_by(b)
        until(lambda: finished(start()) is not None and computed_by(b) >= before + 5)


def test_a_server_ends_in_order_when_asked_though_a_client_holds_a_slot(checkpoint, monitor, b):
    with client(checkpoint, monitor) as start:
        finished(start())
        b.process.terminate()
        assert b.process.wait(DEADLINE_S) == 0
        assert "Error" not in b.process.stderr.read()


def test_who_has_no_nixl_takes_tcp_or_is_told_what_to_do(checkpoint, monkeypatch):
    monkeypatch.setattr(connections.nixl, "is_installed", lambda: False)
    monkeypatch.setattr(nixl_tries, "NixlClient", None)
    with running_monitor() as monitor, expert_server(checkpoint, "--monitor", monitor, "--nixl") as server:
        connect = connections.Connector(server.config["fingerprint"])
        told = connections.Server("x", str(server.shared), server.url)
        with pytest.raises(EngineError, match=r"pip install 'coterie\[nixl\]' here, or start it with --tcp-port"):
            connect._from_afar(told)
    with expert_server(checkpoint, "--nixl", "--tcp-port", "0") as server:
        told = connections.Server("x", str(server.shared), server.url)
        with contextlib.closing(connections.Connector(server.config["fingerprint"])._from_afar(told)) as link:
            assert isinstance(link, connections.TcpClient)


@pytest.mark.parametrize("networks", ["nonsense", "self"])
def test_where_no_network_serves_nixl_a_client_takes_tcp_or_is_told_what_to_do(
    checkpoint, networks, monkeypatch, caplog
):
    with expert_server(checkpoint, "--nixl", "--tcp-port", "0") as both, expert_server(checkpoint, "--nixl") as nixl:
        connect = connections.Connector(nixl.config["fingerprint"])
        servers = [connections.Server("x", str(one.shared), one.url) for one in (both, nixl)]
        monkeypatch.setenv("UCX_TLS", networks)
        with contextlib.closing(connect._from_afar(servers[0])) as link:
            assert isinstance(link, connections.TcpClient)
        assert "server x cannot be reached by NIXL" in caplog.text
        for _ in range(2):
            with pytest.raises(EngineError, match=r"cannot be reached by NIXL: .*; set UCX_TLS .* with --tcp-port"):
                connect._from_afar(servers[1])
        until(lambda: not any(one.get("/load").json()["clients"] for one in (both, nixl)))


def test_a_server_without_nixl_gives_no_slot(checkpoint):
    with expert_server(checkpoint) as server, pytest.raises(EngineError, match="start it with --nixl"):
        NixlClient(server.url, server.config["id"], "x")


@pytest.fixture
def hosts():
    """Two, and a link between them."""
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except PermissionError as error:
            pytest.skip(f"needs network namespaces: {error}")
        yield pair


def test_both_sides_see_that_a_link_between_hosts_is_cut_and_meet_again_when_it_is_back(checkpoint, hosts, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    here, there = hosts
    enter = f"import sys; sys.path.append({str(TESTS)!r}); import network_hosts; network_hosts.enter({there.name!r})"

    def get(path):
        return there.call(httpx.get, server.url + path, trust_env=False).json()

    def call():
        print(file=client.stdin, flush=True)
        return client.stdout.readline()

    with expert_server(checkpoint, "--host", there.address, "--nixl", prelude=enter) as server:
        command = [sys.executable, INSIDE / "nixl_client.py", here.name, server.url, get("/config")["id"], "x"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            sums = call()
            assert get("/load")["requests"]["computed"] == get("/load")["clients"] == 1
            there.set_link("down")
            assert "connection lost" in call()
            until(lambda: get("/load")["clients"] == 0)
            there.set_link("up")
            assert call() == sums
            client.stdin.close()
