"""The fault scripts on real processes, under load: two clients that compute all the time and compare each sum."""

import pytest

from expert_world import ProcessWorld
from fault_scripts import CLIENTS, SCRIPTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ProcessWorld(tmp_path_factory.mktemp("experts")) as running:
        yield running


@pytest.fixture
def whole(world):
    """All run, whatever was done to them before."""
    for name in world.processes:
        if not world.runs(name):
            world.play("start", name)
    world.until_known()
    world.until(lambda: all(client.last for client in world.clients.values()), "clients to begin")
    return world


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_no_call_fails_and_every_sum_is_right(whole, script):
    before = {name: whole.clients[name].last["done"] for name in CLIENTS}
    whole.run(script)
    whole.until_known()
    for name in CLIENTS:
        if whole.runs(name):
            last = whole.clients[name].last
            assert last["failed"] == []
            assert last["wrong"] == 0
            assert last["done"] > before[name]
            whole.until(lambda name=name: len(whole.clients[name].last["servers"]) == len(whole.known()), "tables")
