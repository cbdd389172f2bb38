"""Gateways that tell each other what they hold: several in one loop, over real sockets, in front of the same fakes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from fake_engine import Kv
from stories import Cluster, RawClient, configured, eventually, fakes, post, story

from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.server import serving

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": %d, "stream": true}'
QUICK = {"exchange_s": 0.08, "peer_timeout_s": 0.6}


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextlib.asynccontextmanager
async def gateways(count: int, **settings: Any) -> AsyncIterator[list[Cluster]]:
    """Gateways in front of the same fakes, each with all of them, itself included, as its peers."""
    kv, ports = Kv(), free_ports(count)
    peer = tuple(f"http://127.0.0.1:{port}" for port in ports)
    async with fakes(1, kv) as prefills, fakes(2, kv) as decodes, contextlib.AsyncExitStack() as stack:
        running = []
        for port in ports:
            config = configured(prefills, decodes, **{**QUICK, "peer": peer, "admin_port": port, **settings})
            served = await stack.enter_async_context(serving(config, VllmNixl()))
            running.append(Cluster(prefills, decodes, kv, served.gateway, served.url, served.admin_url, served.changes))
        yield running


def held(one: Cluster) -> list[int]:
    """Requests of all gateways at each decode worker, as this one sees them."""
    return [state.requests for state in one.gateway.decode.ledger.states()]


async def stream(one: Cluster, stack: contextlib.AsyncExitStack, tokens: int = 500) -> RawClient:
    client = await stack.enter_async_context(one.client())
    client.send(post(BODY % tokens))
    await client.reader.readuntil(b"data: ")
    return client


@story
async def test_each_gateway_sees_what_all_hold_and_that_it_is_over():
    async with gateways(3) as all_, contextlib.AsyncExitStack() as stack:
        for engine in all_[0].decode:
            engine.token_delay_s = 0.05
        clients = [await stream(one, stack) for one in (all_[0], all_[1], all_[1])]
        await eventually(lambda: all(sum(held(one)) == 3 for one in all_))
        assert len({tuple(held(one)) for one in all_}) == 1
        assert [sum(load.requests for load in one.gateway.decode.ledger.own().values()) for one in all_] == [1, 2, 0]
        for client in clients:
            client.leave()
        await eventually(lambda: all(held(one) == [0, 0] for one in all_))
