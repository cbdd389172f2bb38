"""Several processes on one port: real ones, in front of fakes in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from fake_engine import Kv
from gateway_commands import Serving, rest, served_by, started, streams
from stories import eventually, fakes, story

from coterie.gateway.config import GatewayConfig, Source
from coterie.gateway.processes.parent import DEATHS_S, Deaths, Group
from coterie.gateway.processes.parent import _board as shared_board
from coterie.gateway.processes.seat import BOARD_PREFIX
from coterie.shm import FOLDER


@story
async def test_processes_are_one_gateway_through_a_death_until_they_stop():
    kv = Kv()
    async with (
        fakes(2, kv) as prefill,
        fakes(3, kv) as decode,
        served_by(prefill, decode, "--processes", "2") as served,
    ):
        assert (await served.admin.delete("/workers/decode-0")).status_code == 202
        assert (await served.admin.post("/workers/prefill-1/drain")).status_code == 200
        for engine in decode:
            engine.token_delay_s = 0.05
        pids = await served.pids(2)
        await a_killed_process_takes_its_own_streams_alone_and_is_replaced(served, pids[0])
        pids |= await served.pids(1)
        await its_successor_knows_the_workers(served)
        await the_admin_side_speaks_for_all(served)
        board = board_of(pids[0])
        assert board.exists()
        await told_to_stop_all_finish_their_streams(served)
        assert not any(alive(pid) for pid in pids.values())
        assert not board.exists()


async def a_killed_process_takes_its_own_streams_alone_and_is_replaced(served: Serving, pid: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = await streams(served, stack, 16, tokens=60)
        held = await served.metric("in_flight_requests")
        assert sum(held.values()) == 16
        assert all(held.values()), "the kernel gave all connections to one process: sixteen coins fell alike"
        assert await served.loads() == {"prefill-0": 0, "prefill-1": 0, "decode-1": 8, "decode-2": 8}
        os.kill(pid, signal.SIGKILL)
        ends = await asyncio.gather(*(rest(client) for client in clients))
    finished = [end for end in ends if end.endswith(b"0\r\n\r\n")]
    assert len(finished) == held["1"]
    assert all(end.count(b"data: ") == 60 for end in finished)  # of 60 tokens and [DONE], the first was read before
    await served.until("process_up", {"0": 1.0, "1": 1.0})
    await served.until("in_flight_requests", {"0": 0.0, "1": 0.0})
    assert await served.metric("process_restarts_total") == {"0": 1.0, "1": 0.0}
    assert await served.loads() == {"prefill-0": 0, "prefill-1": 0, "decode-1": 0, "decode-2": 0}


async def its_successor_knows_the_workers(served: Serving) -> None:
    text = (await served.admin.get("/metrics")).text
    found = re.findall(r'^coterie_worker_available{process="0",role="\w+",worker="(\S+)"} (\S+)$', text, re.MULTILINE)
    assert dict(found) == {"prefill-0": "1.0", "prefill-1": "0.0", "decode-1": "1.0", "decode-2": "1.0"}
    for name in ("prefill-1", "decode-2"):
        assert (await served.admin.post(f"/workers/{name}/undrain")).status_code == 200


async def the_admin_side_speaks_for_all(served: Serving) -> None:
    before = await served.metric("requests_total")
    async with contextlib.AsyncExitStack() as stack:
        for client in await streams(served, stack, 16, tokens=2):
            assert (await rest(client)).endswith(b"0\r\n\r\n")
    after = await served.metric("requests_total")
    assert sum(after.values()) == before["1"] + 16
    assert (await served.admin.get("/health")).json() == {"status": "ok"}
    decisions = (await served.get("/decisions"))["decisions"]
    assert {entry["process"] for entry in decisions[-16:]} == {0, 1}
    assert decisions == sorted(decisions, key=lambda entry: entry["time"])
    policies = (await served.get("/policies"))["policies"]
    assert [(row["process"], row["role"]) for row in policies] == [
        (process, role) for process in (0, 1) for role in ("prefill", "decode")
    ]
    assert (await served.get("/config"))["processes"] == 2
    assert (await served.admin.get("/nothing")).status_code == 404
    assert (await served.admin.post("/health")).status_code == 405
    assert (await served.admin.post("/workers", content=b"x" * (1 << 21))).status_code == 413


async def told_to_stop_all_finish_their_streams(served: Serving) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = await streams(served, stack, 8, tokens=20)
        served.process.terminate()
        ends = await asyncio.gather(*(rest(client) for client in clients))
    assert all(b"data: [DONE]" in end and end.endswith(b"0\r\n\r\n") for end in ends)
    assert await served.process.wait() == 0


@story
async def test_processes_end_when_the_first_is_killed():
    kv = Kv()
    async with (
        fakes(1, kv) as prefill,
        fakes(1, kv) as decode,
        served_by(prefill, decode, "--processes", "2") as served,
    ):
        pids = await served.pids(2)
        served.process.kill()
        await eventually(lambda: not any(alive(pid) for pid in pids.values()), 30)


def board_of(pid: int) -> Path:
    return Path(re.search(rf"{FOLDER}/{BOARD_PREFIX}\w+", Path(f"/proc/{pid}/maps").read_text())[0])


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@story
async def test_a_process_that_cannot_serve_ends_the_start_with_its_reason():
    urls = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--startup-timeout-s", "0.1"]
    async with started(*urls, "--processes", "2", "--port", "0", "--admin-port", "0") as process:
        _, errors = await process.communicate()
        assert process.returncode == 1
        assert "coterie: no prefill worker is available" in errors.decode()
        assert "Traceback" not in errors.decode()


def test_the_dead_are_replaced_ever_later_and_the_fifth_of_a_minute_is_not():
    deaths = Deaths()
    assert [deaths.note(now_s) for now_s in (0, 1, 2, 3)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert deaths.note(DEATHS_S + 0.5) == pytest.approx(0.8)  # that at 0 s is forgotten
    assert deaths.note(DEATHS_S + 0.6) is None


@story
async def test_a_process_that_starts_as_the_gateway_is_told_to_stop_is_told_so_too():
    config = GatewayConfig(prefill=("http://a:1",), decode=("http://b:1",), processes=2)
    with shared_board(config) as file:
        group = Group(config, Source(None, {}), ["sleep", "60"], file)
        starting = asyncio.create_task(group.start())
        await asyncio.sleep(0)  # its keepers have begun, and no process has
        await asyncio.sleep(0)
        assert not group.members
        await asyncio.wait_for(group.stop(), 5)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
