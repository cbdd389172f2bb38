"""Expert servers on two hosts, which have no memory in common, and a link between them that is cut."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from served import FixedDirectory, known_model

from coterie.errors import EngineError
from coterie.experts.client import Connector, Patience, RemoteExperts, RoutingTable, Server
from expert_processes import expert_server
from network_hosts import two_hosts
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.slow
DEADLINE_S = 30
TESTS = Path(__file__).parents[2]


class HostedServer:
    """A server on a host."""

    def __init__(self, process, host):
        self.process, self.host = process, host
        self.server = Server(host.name, self.get("/config")["shared_memory"], process.url)

    def get(self, path):
        return self.host.call(httpx.get, f"{self.process.url}{path}", trust_env=False).json()

    @property
    def computed(self):
        return self.get("/load")["requests"]["computed"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A client's host, with a replica, and one more replica beyond the link."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except PermissionError as error:
            pytest.skip(f"needs network namespaces: {error}")
        near, far = (HostedServer(stack.enter_context(hosted(checkpoint, host)), host) for host in hosts)
        yield SimpleNamespace(here=hosts[0], near=near, far=far, model=known_model(checkpoint))


def hosted(checkpoint, host):
    enter = f"import sys; sys.path.append({str(TESTS)!r}); import network_hosts; network_hosts.enter({host.name!r})"
    return expert_server(checkpoint, "--host", host.address, "--tcp-port", "0", prelude=enter)


@contextlib.contextmanager
def client(world, *servers):
    """A client on the first host; its own thread would be another, so each call says where it runs."""
    model = world.model
    held = {one.server: [range(model.geometry.experts)] * model.geometry.layers for one in servers}
    directory = FixedDirectory(RoutingTable.of(model.geometry, held, epoch=0, tokens=64))
    patience = Patience(reply_s=0.2, probe_s=0.1)
    remote = RemoteExperts(model.geometry, model.hidden, directory, Connector(model.fingerprint), patience=patience)
    with contextlib.closing(remote):
        yield lambda limit_s=DEADLINE_S: world.here.call(
            lambda: remote.compute(0, *inputs(model), time.monotonic() + limit_s)
        )


def inputs(model, tokens=40):
    rng, geometry = np.random.default_rng(tokens), model.geometry
    ids = rng.permuted(np.tile(np.arange(geometry.experts), (tokens, 1)), axis=1)[:, : geometry.top_k]
    return rng.standard_normal((tokens, model.hidden), np.float32), ids, rng.random(ids.shape, np.float32)


@contextlib.contextmanager
def cut(world):
    world.far.host.set_link("down")
    try:
        yield
    finally:
        world.far.host.set_link("up")


def test_a_server_on_another_host_gives_the_same_bits(world):
    with client(world, world.near) as near, client(world, world.far) as far:
        assert near().tobytes() == far().tobytes()
    assert world.near.computed == world.far.computed == 1


def test_a_cut_link_costs_no_call_where_there_is_a_replica_and_its_server_is_asked_again_afterwards(world):
    with client(world, world.near) as near:
        expected = near()
    with client(world, world.near, world.far) as both:
        np.testing.assert_allclose(both(), expected, rtol=1e-5, atol=1e-5)
        with cut(world):
            for _ in range(5):
                np.testing.assert_allclose(both(), expected, rtol=1e-5, atol=1e-5)
        before, end_s = world.far.computed, time.monotonic() + DEADLINE_S
        while world.far.computed < before + 5:
            assert time.monotonic() < end_s, "it is not asked again"
            np.testing.assert_allclose(both(), expected, rtol=1e-5, atol=1e-5)


def test_the_last_owner_beyond_a_cut_link_is_named_and_computes_when_it_is_back(world):
    with client(world, world.far) as far:
        expected = far()
        with cut(world), pytest.raises(EngineError, match=rf"no reply by the deadline .*{world.far.host.name}"):
            far(0.5)
        assert far().tobytes() == expected.tobytes()


def test_slots_of_a_host_that_is_cut_off_become_free_and_its_client_connects_anew(world):
    with client(world, world.far) as far:
        expected = far()
        with cut(world):
            end_s = time.monotonic() + DEADLINE_S
            while world.far.get("/load")["clients"]:
                assert time.monotonic() < end_s
                time.sleep(0.1)
        assert far().tobytes() == expected.tobytes()
