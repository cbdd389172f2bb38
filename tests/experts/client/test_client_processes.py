"""Real server processes that die, stop and come back, with a call under way."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from served import FixedDirectory, known_model

from coterie.errors import EngineError, GoneError, WireError
from coterie.experts.client import (
    MonitoredDirectory,
    Patience,
    RemoteExperts,
    RoutingTable,
    Server,
    connections,
    model_experts,
)
from coterie.experts.client.connections import Connector
from coterie.experts.client.exchange import LOOK_S
from coterie.experts.client.model_experts import ExpertsConfig, remote_experts
from coterie.experts.monitor.calls import ask
from coterie.experts.monitor.messages import Status
from coterie.experts.protocol import Request
from coterie.experts.transport.tcp import TcpClient
from expert_processes import expert_server
from running_monitor import running_monitor, until
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def model(checkpoint):
    return known_model(checkpoint)


@pytest.fixture(scope="module")
def a(checkpoint):
    with expert_server(checkpoint, "--name", "a", "--tcp-port", "0") as server:
        yield server


@pytest.fixture
def b(checkpoint):
    with expert_server(checkpoint, "--name", "b", "--tcp-port", "0") as server:
        yield server


@pytest.fixture(params=["shared memory", "tcp"])
def transport(request, monkeypatch):
    """By what the servers are reached; for TCP they are taken for servers of another host."""
    if request.param == "tcp":
        monkeypatch.setattr(connections, "_is_here", lambda _: False)
    return request.param


def directory_of(model, **servers):
    everything = [range(model.geometry.experts)] * model.geometry.layers
    held = {Server(name, str(server.shared), server.url): everything for name, server in servers.items()}
    return FixedDirectory(RoutingTable.of(model.geometry, held, epoch=0, tokens=64))


@contextlib.contextmanager
def client(model, directory, **patience):
    remote = RemoteExperts(
        model.geometry, model.hidden, directory, Connector(model.fingerprint), patience=Patience(**patience)
    )
    with contextlib.closing(remote):
        yield remote


def inputs(model, tokens=40):
    rng = np.random.default_rng(tokens)
    geometry = model.geometry
    ids = rng.permuted(np.tile(np.arange(geometry.experts), (tokens, 1)), axis=1)[:, : geometry.top_k]
    return rng.standard_normal((tokens, model.hidden), np.float32), ids, rng.random(ids.shape, np.float32)


def undisturbed(model, directory):
    with client(model, directory) as remote:
        return remote.compute(0, *inputs(model), time.monotonic() + 20)


def computed_by(server):
    return server.get("/load").json()["requests"]["computed"]


def stop(server):
    """Suspend it, and return when it is."""
    os.kill(server.process.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{server.process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


@pytest.mark.usefixtures("transport")
def test_a_replica_that_is_killed_in_a_call_costs_no_bit(model, a, b):
    directory = directory_of(model, a=a, b=b)
    expected = undisturbed(model, directory)
    with client(model, directory, reply_s=60) as remote:
        stop(b)  # so that it has the request, and cannot reply
        started = remote.start(0, *inputs(model))
        b.process.kill()
        np.testing.assert_array_equal(started.finish(time.monotonic() + 20), expected)


@pytest.mark.usefixtures("transport")
def test_a_replica_that_is_stopped_costs_no_bit_and_is_asked_again_when_it_goes_on(model, a, b):
    directory = directory_of(model, a=a, b=b)
    expected = undisturbed(model, directory)
    with client(model, directory, reply_s=0.05, probe_s=0.01) as remote:
        stop(b)
        for _ in range(3):
            np.testing.assert_array_equal(remote.compute(0, *inputs(model), time.monotonic() + 20), expected)
        os.kill(b.process.pid, signal.SIGCONT)
        before, end_s = computed_by(b), time.monotonic() + 20
        while computed_by(b) < before + 5:  # more than the withdrawn request and the probe
            assert time.monotonic() < end_s, "it is not asked again"
            remote.compute(0, *inputs(model), time.monotonic() + 20)


@pytest.fixture(scope="module")
def late(checkpoint):
    """A server that needs 0.4 s for all of a call, and has one slot for each transport."""
    with expert_server(
        checkpoint, "--name", "late", "--tcp-port", "0", "--pairs-per-s", "200", "--slots", "1"
    ) as server:
        yield server


@pytest.fixture
def free(late):
    """The late server, as soon as the clients of earlier tests have left."""
    until(lambda: late.get("/load").json()["clients"] == 0)
    return late


@pytest.mark.slow  # waits for a server that is slow on purpose
@pytest.mark.usefixtures("transport")
def test_a_server_that_is_late_is_doubted_but_never_lost_and_asked_again(model, a, free, caplog):
    caplog.set_level(logging.INFO)
    directory = directory_of(model, a=a, late=free)
    expected = undisturbed(model, directory)
    until(lambda: free.get("/load").json()["clients"] == 0)
    before = computed_by(free)
    with client(model, directory, reply_s=0.1, probe_s=0.05) as remote:
        until(
            lambda: (
                np.testing.assert_array_equal(remote.compute(0, *inputs(model), time.monotonic() + 20), expected)
                or computed_by(free) >= before + 5
            )  # two probes at least, and what came too late
        )
    assert caplog.text.count("late is suspect") >= 2 <= caplog.text.count("late is good")
    assert "lost" not in caplog.text


@pytest.mark.slow  # as above
@pytest.mark.usefixtures("transport")
def test_a_late_server_that_has_no_replica_is_waited_for_and_asked_once(model, a, free):
    expected = undisturbed(model, directory_of(model, a=a))
    before = computed_by(free)
    with client(model, directory_of(model, late=free), reply_s=0.1) as remote:
        np.testing.assert_array_equal(remote.compute(0, *inputs(model), time.monotonic() + 20), expected)
    assert computed_by(free) == before + 1


@pytest.mark.slow  # as above
@pytest.mark.usefixtures("transport")
def test_a_server_that_has_no_slot_but_those_that_the_client_uses_is_not_doubted(model, free, monkeypatch):
    directory, doubts = directory_of(model, late=free), []
    monkeypatch.setattr(directory, "doubt", lambda server, *, gone: doubts.append((server, gone)))
    with client(model, directory, reply_s=60) as remote:
        expected = remote.compute(0, *inputs(model), time.monotonic() + 20)
        started = [remote.start(0, *inputs(model)) for _ in range(2)]
        for one in started:
            np.testing.assert_array_equal(one.finish(time.monotonic() + 20), expected)
    assert doubts == []


@pytest.mark.slow  # as above
@pytest.mark.usefixtures("transport")
def test_calls_that_share_the_only_slot_are_computed_whichever_has_it(model, a, free, monkeypatch):
    expected = undisturbed(model, directory_of(model, a=a))
    first = itertools.count()
    monkeypatch.setattr(
        connections, "ask", lambda *args, **named: (next(first) or time.sleep(0.2), ask(*args, **named))[1]
    )
    with client(model, directory_of(model, late=free), reply_s=60) as remote:
        started = [remote.start(0, *inputs(model)) for _ in range(2)]  # by TCP, the second one is connected first
        for one in started:
            np.testing.assert_array_equal(one.finish(time.monotonic() + 20), expected)


@pytest.mark.usefixtures("elsewhere")
def test_the_last_owner_is_not_asked_without_pause_where_nobody_answers(model, monkeypatch):
    everything = [range(model.geometry.experts)] * model.geometry.layers
    nobody = {Server("x", "nowhere", "http://127.0.0.1:1"): everything}
    asked = []
    monkeypatch.setattr(connections, "ask", lambda *args, **named: (asked.append(args), ask(*args, **named))[1])
    directory = FixedDirectory(RoutingTable.of(model.geometry, nobody, epoch=0, tokens=64))
    with client(model, directory) as remote, pytest.raises(EngineError, match=r"x \(lost: .* cannot be reached"):
        remote.compute(0, *inputs(model), time.monotonic() + 0.5)
    assert 2 <= len(asked) <= 0.5 / LOOK_S + 3  # a probe among them


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_a_server_of_another_host_gives_the_same_bits(model, a, monkeypatch, tokens):
    directory, sums, made = directory_of(model, a=a), [], []
    monkeypatch.setattr(connections, "TcpClient", lambda *args: made.append(args) or TcpClient(*args))
    for here in (True, False):
        monkeypatch.setattr(connections, "_is_here", lambda _, here=here: here)
        with client(model, directory) as remote:
            sums.append(remote.compute(0, *inputs(model, tokens), time.monotonic() + 20))
    assert sums[0].tobytes() == sums[1].tobytes()
    assert [args[0] for args in made] == [("127.0.0.1", a.config["tcp"]["port"])]


@pytest.mark.slow  # starts two processes, one after the other
def test_a_server_that_is_started_again_takes_the_place_of_the_last_owner(model, checkpoint):
    with (
        running_monitor() as monitor,
        contextlib.closing(MonitoredDirectory(monitor, model.geometry, model.fingerprint, "test")) as directory,
        client(model, directory) as remote,
    ):
        with expert_server(checkpoint, "--monitor", monitor) as first:
            directory.await_all(time.monotonic() + 20)
            expected = remote.compute(0, *inputs(model), time.monotonic() + 20)
            stop(first)
            started = [remote.start(0, *inputs(model)) for _ in range(2)]
            first.process.kill()
        failed = r"no reply by the deadline for experts \[0, 1, .*; failed: experts: .* (died|is gone)"
        with pytest.raises(EngineError, match=failed):  # gone: any server's start sweeps what dead ones left
            started[0].finish(time.monotonic() + 0.2)
        over = threading.Event()
        comes = threading.Thread(target=_serve, args=(checkpoint, monitor, over))
        comes.start()
        try:
            np.testing.assert_array_equal(started[1].finish(time.monotonic() + 30), expected)
        finally:
            over.set()
            comes.join()


def _serve(checkpoint, monitor, over):
    with expert_server(checkpoint, "--monitor", monitor):
        over.wait()


@pytest.fixture
def elsewhere(monkeypatch):
    """No server is on this host."""
    monkeypatch.setattr(connections, "_is_here", lambda _: False)


def failure(server, fingerprint="0" * 32):
    """What is wrong with a connection to a server of another host."""
    request = Request(0, 0, 0, np.zeros((1, 64), np.float32), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
    with contextlib.closing(Connector(fingerprint)(server)) as link:
        pending = link.post(request)
        with pytest.raises((EngineError, WireError)) as caught:
            assert pending.look(time.monotonic() + 20) is None
        pending.withdraw()
    return caught


@pytest.mark.usefixtures("elsewhere")
def test_a_server_that_cannot_be_reached_says_why_when_its_reply_is_waited_for(a, checkpoint):
    path = str(a.shared)
    another = failure(Server("a", path + "0", a.url))
    assert another.type is GoneError
    assert "another one has its URL" in str(another.value)
    assert "cannot be reached" in str(failure(Server("x", path, "http://127.0.0.1:1")).value)
    assert "must be http" in str(failure(Server("x", path, "nowhere")).value)
    with expert_server(checkpoint) as local:
        assert "start it with --tcp-port" in str(failure(Server("x", str(local.shared), local.url)).value)


@pytest.mark.usefixtures("transport")
def test_a_server_of_another_model_is_not_asked(model, a):
    """Of the same shapes: nothing else would notice."""
    other = SimpleNamespace(**{**vars(model), "fingerprint": "0" * 32})
    before = a.get("/load").json()["requests"]
    said = f"a has experts with the fingerprint {model.fingerprint[:12]}, this client's model has 000000000000"
    with client(other, directory_of(model, a=a), probe_s=0.01) as remote, pytest.raises(EngineError, match=said):
        remote.compute(0, *inputs(model), time.monotonic() + 0.3)
    assert a.get("/load").json()["requests"] == before


@pytest.mark.slow  # starts a process
def test_a_client_of_another_revision_finds_no_server_and_is_told_of_both(
    model, checkpoint, tmp_path, monkeypatch, caplog
):
    shutil.copytree(checkpoint, tmp_path / "revised")
    tensors = load_file(checkpoint / "model.safetensors")
    changed = {name: values * 1.5 if ".experts." in name else values for name, values in tensors.items()}
    save_file(changed, tmp_path / "revised" / "model.safetensors")
    revised = known_model(tmp_path / "revised").fingerprint[:12]
    monkeypatch.setattr(model_experts, "READY_S", 0.5)
    with running_monitor() as monitor, expert_server(checkpoint, "--monitor", monitor) as server:
        assert server.config["fingerprint"] == model.fingerprint
        until(lambda: ask(monitor, "GET", "/status", Status).coverage.fingerprint == model.fingerprint)
        config = ExpertsConfig(monitor, "test")
        said = rf"fingerprint {revised}, have no server, .* knows experts \(serving\) of .*{model.fingerprint[:12]}"
        with pytest.raises(EngineError, match=said), remote_experts(tmp_path / "revised", config):
            pass
        assert f"this client's has the fingerprint {revised}" in caplog.text
        with remote_experts(checkpoint, config) as remote:
            remote.compute(0, *inputs(model), time.monotonic() + 20)


@pytest.mark.parametrize(
    ("offer", "message"),
    [({}, "does not answer as it should"), ({"id": "0x", "tcp": None}, "non-hexadecimal"),
     ({"id": "00", "tcp": {"host": "::", "port": 1}}, "need 16 bytes"),
     ({"id": "00" * 16, "tcp": {"host": "0.0.0.0", "port": 1}}, r"reached at 127\.0\.0\.1 port 1")],
)  # fmt: skip
@pytest.mark.usefixtures("elsewhere")
def test_what_a_server_says_of_itself_is_checked(offer, message, monkeypatch):
    content = json.dumps({"shared_memory": "x", **offer}).encode()
    with http_server(content) as url:
        assert re.search(message, str(failure(Server("x", "x", url)).value))


@contextlib.contextmanager
def http_server(content):
    """What answers everything with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.usefixtures("elsewhere")
def test_a_connection_that_is_not_made_yet_holds_up_nobody_and_is_closed_when_it_is(monkeypatch, a):
    goes_on, made = threading.Event(), []
    monkeypatch.setattr(connections, "ask", lambda *args, **kwargs: (goes_on.wait(20), ask(*args, **kwargs))[1])
    monkeypatch.setattr(connections, "TcpClient", lambda *args: made.append(TcpClient(*args)) or made[0])
    link = Connector(a.config["fingerprint"])(Server("a", str(a.shared), a.url))
    pending = link.post(
        Request(0, 0, 0, np.zeros((1, 64), np.float32), np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
    )
    assert pending.look(time.monotonic() + 0.01) is None
    pending.withdraw()
    link.close()
    goes_on.set()
    end_s = time.monotonic() + 20
    while not made or made[0].fileno() != -1:
        assert time.monotonic() < end_s
        time.sleep(0.001)
