"""The workers of one role, in a process that shares its view of them."""

from __future__ import annotations

import pytest
from stories import story

from coterie.clock import SystemClock
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.fleet.workers import Fleet, states_of
from coterie.gateway.processes.seat import Seat
from coterie.routing import make_policy
from coterie.routing.shared_load import MOST_WORKERS, Board


@story
async def test_more_workers_than_processes_can_show_each_other_are_refused_before_anything_changes() -> None:
    config = GatewayConfig(prefill=("http://p:1",), decode=("http://d:1",))
    fleet = Fleet("decode", config.decode, config, SystemClock(), seat=Seat(0, Board(bytearray(Board.size(1)), 1)))
    most = fleet.at([f"http://d:{i}" for i in range(1, MOST_WORKERS + 1)], config)
    fleet.retarget(most, make_policy("round_robin", states_of(most)))
    with pytest.raises(ConfigError, match=r"decode: more than 1023 different workers .* restart the gateway"):
        fleet.at(["http://d:9999"], config)
    assert fleet.targets == most
    assert fleet.at(["http://d:1"], config) == most[:1]


@story
async def test_a_process_that_takes_a_dead_ones_place_has_its_names_and_drained_workers() -> None:
    config = GatewayConfig(prefill=("http://p:1",), decode=("http://d:1", "http://d:3"))
    urls = {"prefill-0": "http://p:1", "decode-0": "http://d:1", "decode-1": "http://d:2", "decode-2": "http://d:3"}
    seat = Seat(0, Board(bytearray(Board.size(1)), 1), urls, ["decode-2"])
    fleet = Fleet("decode", config.decode, config, SystemClock(), seat=seat)
    assert {worker.name: worker.problems.get("draining") for worker in fleet.targets} == {
        "decode-0": None,
        "decode-2": "draining",
    }
    assert [worker.name for worker in fleet.at(["http://d:2", "http://d:4"], config)] == ["decode-1", "decode-3"]
