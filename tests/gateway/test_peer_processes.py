"""Gateways as processes that tell each other what they hold, killed, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from fake_engine import Kv
from gateway_commands import Serving, served_by, streams
from stories import fakes, free_ports, long_story

pytestmark = pytest.mark.slow


@long_story
async def test_what_a_gateway_holds_counts_at_others_as_long_as_it_is_heard_of():
    kv, (port, other_port) = Kv(), free_ports(2)
    peers = [part for its in (port, other_port) for part in ("--peer", f"http://127.0.0.1:{its}")]
    peers += ["--exchange-s", "0.2", "--peer-timeout-s", "1"]
    async with fakes(1, kv) as prefill, fakes(2, kv) as decode, contextlib.AsyncExitStack() as stack:
        for engine in decode:
            engine.token_delay_s = 0.05
        many = await stack.enter_async_context(
            served_by(prefill, decode, *peers, "--admin-port", str(port), "--processes", "2")
        )
        pids = await many.pids(2)
        other_arguments = (*peers, "--admin-port", str(other_port))
        async with served_by(prefill, decode, *other_arguments) as one:
            await all_processes_of_both_see_what_both_hold(many, one, stack)
            await who_is_stopped_is_forgotten_until_it_goes_on(many, one)
            left = await what_a_killed_process_held_is_taken_back_at_the_other_gateway(many, one, pids[0])
            former = (await many.get("/peers"))["peers"][1]["identity"]
            one.process.kill()
            await many.load(left)
        async with served_by(prefill, decode, *other_arguments) as one:
            await streams(one, stack, 2, tokens=5000)
            await many.load(left + 2)
            assert (await many.get("/peers"))["peers"][1]["identity"] != former


async def all_processes_of_both_see_what_both_hold(
    many: Serving, one: Serving, clients: contextlib.AsyncExitStack
) -> None:
    await streams(many, clients, 8, tokens=5000)
    await streams(one, clients, 3, tokens=5000)
    await many.load(11)
    await one.load(11)
    assert 'coterie_peer_in_flight_requests{peer="peer-1"} 3.0' in (await many.admin.get("/metrics")).text
    assert 'coterie_peer_in_flight_requests{peer="peer-0"} 8.0' in (await one.admin.get("/metrics")).text


async def who_is_stopped_is_forgotten_until_it_goes_on(many: Serving, one: Serving) -> None:
    one.process.send_signal(signal.SIGSTOP)
    await many.load(8)
    one.process.send_signal(signal.SIGCONT)
    await many.load(11)
    await one.load(11)


async def what_a_killed_process_held_is_taken_back_at_the_other_gateway(many: Serving, one: Serving, pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    await many.until("process_up", {"0": 1.0, "1": 1.0})
    left = sum((await many.metric("in_flight_requests")).values())
    assert left < 8, "the kernel gave all connections to the other one: eight coins fell alike"
    await many.load(left + 3)
    await one.load(left + 3)
    return left
