"""Real server processes that die, stop and come back, with a call under way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from served import FixedDirectory

from coterie.errors import EngineError
from coterie.experts.client import MonitoredDirectory, Patience, RemoteExperts, RoutingTable, Server
from coterie.experts.client.model_experts import shared_memory
from coterie.modeling.expert_tensors import read_expert_model
from expert_processes import expert_server
from running_monitor import running_monitor
from tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def model(checkpoint):
    return read_expert_model(checkpoint)


@pytest.fixture(scope="module")
def a(checkpoint):
    with expert_server(checkpoint, "--name", "a") as server:
        yield server


@pytest.fixture
def b(checkpoint):
    with expert_server(checkpoint, "--name", "b") as server:
        yield server


def directory_of(model, **servers):
    everything = [range(model.geometry.experts)] * model.geometry.layers
    held = {Server(name, str(server.shared)): everything for name, server in servers.items()}
    return FixedDirectory(RoutingTable.of(model.geometry, held, epoch=0, tokens=64))


@contextlib.contextmanager
def client(model, directory, **patience):
    remote = RemoteExperts(model.geometry, model.hidden, directory, shared_memory, patience=Patience(**patience))
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


def test_a_replica_that_is_killed_in_a_call_costs_no_bit(model, a, b):
    directory = directory_of(model, a=a, b=b)
    expected = undisturbed(model, directory)
    with client(model, directory, reply_s=60) as remote:
        stop(b)  # so that it has the request, and cannot reply
        started = remote.start(0, *inputs(model))
        b.process.kill()
        np.testing.assert_array_equal(started.finish(time.monotonic() + 20), expected)


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


@pytest.mark.slow  # starts two processes, one after the other
def test_a_server_that_is_started_again_takes_the_place_of_the_last_owner(model, checkpoint):
    with (
        running_monitor() as monitor,
        contextlib.closing(MonitoredDirectory(monitor, model.geometry, "test")) as directory,
        client(model, directory) as remote,
    ):
        with expert_server(checkpoint, "--monitor", monitor) as first:
            directory.await_all(time.monotonic() + 20)
            expected = remote.compute(0, *inputs(model), time.monotonic() + 20)
            stop(first)
            started = [remote.start(0, *inputs(model)) for _ in range(2)]
            first.process.kill()
        with pytest.raises(
            EngineError, match=r"no reply by the deadline for experts \[0, 1, .*; failed: experts: .* died"
        ):
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
