"""The fault scripts over TCP: monitor and clients on one host, each server on another, links that are cut.

Those that are left out do more of the same to the monitor or to servers; `bench/expert_faults.py` plays them, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from expert_world import Hosts, ProcessWorld, play_and_check
from fault_scripts import CLIENTS, CUTS, SCRIPTS, SERVERS
from network_hosts import hub_and_spokes

pytestmark = pytest.mark.slow
LEFT_OUT = {
    "a server is killed while the monitor is away",
    "a server is started while the monitor is away",
    "the monitor hangs and goes on",
    "servers are replaced one after the other",
}
PLAYED = {name: script for name, script in SCRIPTS.items() if name not in LEFT_OUT} | CUTS


@pytest.fixture(scope="module")
def hosts():
    try:
        with hub_and_spokes(len(SERVERS)) as (hub, spokes):
            yield Hosts(hub, dict(zip(SERVERS, spokes, strict=True)))
    except PermissionError as error:
        pytest.skip(f"needs network namespaces: {error}")


@pytest.fixture(scope="module")
def world(hosts, tmp_path_factory):
    with ProcessWorld(tmp_path_factory.mktemp("experts"), hosts=hosts) as running:
        yield running


def test_clients_reach_servers_by_tcp_alone(world):
    addresses = world.clients["c0"].last["servers"]
    assert len(addresses) == len(SERVERS)
    for name in (*CLIENTS, *SERVERS):
        seen = Path(f"/proc/{world.processes[name].pid}/root")
        assert sum(seen.joinpath(address[1:]).exists() for address in addresses) == (name in SERVERS)


@pytest.mark.parametrize("script", PLAYED.values(), ids=PLAYED)
def test_no_call_fails_and_every_sum_is_right(world, script):
    play_and_check(world, script)
