"""Gateways that tell each other what they hold: several in one loop, over real sockets, in front of the same fakes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from certificates import Certificate, made
from fake_engine import Kv
from stories import Cluster, RawClient, configured, eventually, fakes, free_ports, post, story

from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.peers.message import MAX_MESSAGE_BYTES, MEDIA
from coterie.gateway.server import serving
from coterie.http_server import url_of

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": %d, "stream": true}'
QUICK = {"exchange_s": 0.08, "peer_timeout_s": 0.6}


@contextlib.asynccontextmanager
async def gateways(*settings: dict[str, Any], **common: Any) -> AsyncIterator[list[Cluster]]:
    """Gateways in front of the same fakes, one for each `settings`; each has all as its peers, itself included."""
    kv, ports = Kv(), free_ports(len(settings))
    peer = tuple(f"http://127.0.0.1:{port}" for port in ports)
    counts = common.pop("counts", None)
    async with fakes(1, kv, counts) as prefills, fakes(2, kv) as decodes, contextlib.AsyncExitStack() as stack:
        for engine in decodes:
            engine.token_delay_s = 0.05
        running = []
        for port, its in zip(ports, settings, strict=True):
            config = configured(prefills, decodes, **{**QUICK, "peer": peer, "admin_port": port, **common, **its})
            served = await stack.enter_async_context(serving(config, VllmNixl()))
            running.append(Cluster(prefills, decodes, kv, served.gateway, served.url, served.admin_url, served.changes))
        yield running


@contextlib.asynccontextmanager
async def beside(one: Cluster, **settings: Any) -> AsyncIterator[Cluster]:
    """One more gateway in front of the same fakes, which that one does not know."""
    async with serving(dataclasses.replace(one.gateway.config, admin_port=0, **settings), VllmNixl()) as served:
        yield dataclasses.replace(one, gateway=served.gateway, url=served.url, admin_url=served.admin_url)


def held(one: Cluster) -> list[int]:
    """Requests of all gateways at each decode worker, as this one sees them."""
    return [state.requests for state in one.gateway.decode.ledger.states()]


def total(one: Cluster) -> int:
    return sum(held(one))


async def stream(one: Cluster, stack: contextlib.AsyncExitStack, tokens: int = 500) -> RawClient:
    client = await stack.enter_async_context(one.client())
    client.send(post(BODY % tokens))
    await client.reader.readuntil(b"data: ")
    return client


async def peers(one: Cluster, **named: Any) -> Any:
    async with httpx.AsyncClient(base_url=one.admin_url, **named) as admin:
        return (await admin.get("/peers")).json()


class Network:
    """A host's way to a gateway: it may lose what is sent, or stop where it is."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[str]:
        """The URL of a way to this port."""
        server = await asyncio.start_server(
            lambda reader, writer: self._both_ways(port, reader, writer), "127.0.0.1", 0
        )
        try:
            yield url_of(server.sockets[0])
        finally:
            self.open.set()
            self.lose()
            server.close()

    def lose(self) -> None:
        """All connections are lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def _both_ways(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            self._writers |= {writer, far_writer}
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
            self._writers -= {writer, far_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self.open.wait()
                writer.write(data)
            writer.close()


@story
async def test_each_gateway_sees_what_all_hold_and_that_it_is_over():
    async with gateways({}, {}, {}) as all_, contextlib.AsyncExitStack() as stack:
        clients = [await stream(one, stack) for one in (all_[0], all_[1], all_[1])]
        await eventually(lambda: all(total(one) == 3 for one in all_))
        assert len({tuple(held(one)) for one in all_}) == 1
        assert [sum(load.requests for load in one.gateway.decode.ledger.own().values()) for one in all_] == [1, 2, 0]
        for client in clients:
            client.leave()
        await eventually(lambda: all(held(one) == [0, 0] for one in all_))


@story
async def test_workers_are_known_by_where_they_are_however_that_is_written():
    async with gateways({}) as (one,), contextlib.AsyncExitStack() as stack:
        decode = tuple(engine.url.replace("http:", "HTTP:") + "/" for engine in one.decode)
        async with beside(one, decode=decode[::-1], peer=(one.admin_url,)) as other:
            await stream(other, stack)
            await eventually(lambda: total(one) == 1)
            assert held(one) == held(other)[::-1]


@story
async def test_a_gateway_that_stops_takes_its_load_along_at_once():
    async with gateways({}, peer_timeout_s=60) as (one,), contextlib.AsyncExitStack() as stack:
        async with beside(one, peer=(one.admin_url,)) as other:
            await stream(other, stack)
            await eventually(lambda: total(one) == 1)
        assert total(one) == 0
        assert (await peers(one))["others"] == []


@story
async def test_the_admin_side_shows_who_is_told_and_who_was_heard():
    async with gateways({}, {}) as (one, other), contextlib.AsyncExitStack() as stack:
        await stream(other, stack)
        await eventually(lambda: total(one) == 1)
        mine, theirs = await peers(one), await peers(other)
        itself, its = mine["peers"]
        assert (itself["name"], itself["identity"], itself["view"]) == ("peer-0", mine["identity"], None)
        assert (its["name"], its["url"], its["problem"]) == ("peer-1", other.admin_url, None)
        assert its["identity"] == its["view"]["identity"] == theirs["identity"]
        assert (its["view"]["requests"], its["view"]["unknown_workers"], mine["others"]) == (1, 0, [])
        assert its["view"]["heard_ago_s"] < 60
        assert one.metric("peer_in_flight_requests", peer="peer-1") == 1
        assert one.metric("peer_messages_total", peer="peer-1", outcome="taken") > 0
        assert one.metric("peer_messages_total", peer="peer-0", outcome="taken") == 1, "it tells itself nothing more"
        assert one.metric("peer_messages_heard_total", outcome="counts") > 0


@story
async def test_what_is_beyond_a_partition_no_longer_counts_until_that_is_over():
    network = Network()
    async with (
        gateways({}) as (one,),
        network.to(one.gateway.config.admin_port) as way,
        beside(one, peer=(way,)) as there,
        contextlib.AsyncExitStack() as stack,
    ):
        await stream(there, stack)
        await eventually(lambda: total(one) == 1)
        network.open.clear()
        await eventually(lambda: total(one) == 0)
        await eventually(lambda: total(there) == 1)
        await eventually(lambda: there.metric("peer_messages_total", peer="peer-0", outcome="failed") > 0)
        assert (await peers(there))["peers"][0]["problem"] == "peer-0 did not answer for 0.6 s"
        network.open.set()
        await eventually(lambda: total(one) == 1)
        network.lose()
        await stream(there, stack)  # of which it hears by another connection alone
        await eventually(lambda: total(one) == 2)


@story
async def test_however_often_a_way_fails_views_are_right_once_it_holds():
    network, rng = Network(), random.Random(7)
    async with (
        gateways({}) as (one,),
        network.to(one.gateway.config.admin_port) as way,
        beside(one, peer=(way,)) as there,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = []
        for _ in range(12):
            if len(clients) < 2 or rng.random() < 0.5:
                clients.append(await stream(there, stack))
            else:
                clients.pop().leave()
            network.lose()
            await asyncio.sleep(rng.random() / 10)
            (network.open.clear if rng.random() < 0.5 else network.open.set)()
        network.open.set()
        await eventually(lambda: total(one) == len(clients))
        for client in clients:
            client.leave()
        await eventually(lambda: total(one) == total(there) == 0)
        assert len((await peers(one))["others"]) == 1


@story
async def test_a_peer_that_hangs_is_told_nothing_and_holds_nobody_up():
    network = Network()
    network.open.clear()
    async with (
        gateways({}, peer_timeout_s=0.3) as (one,),
        network.to(one.gateway.config.admin_port) as way,
        gateways({"peer": (way, one.admin_url)}, peer_timeout_s=0.3) as (other,),
    ):
        await eventually(lambda: other.metric("peer_messages_total", peer="peer-0", outcome="failed") > 1)
        assert other.metric("peer_messages_total", peer="peer-1", outcome="refused") > 3, "its workers are others"
        rows = (await peers(other))["peers"]
        assert rows[0]["problem"] == "peer-0 did not answer for 0.3 s"
        assert "it answered 409: none of the peer's 3 workers is one of this gateway's" in rows[1]["problem"]
        assert (await peers(one))["others"] == []


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return made(tmp_path_factory.mktemp("tls"))


KEYED = {"admin_key_env": "ADMIN_KEY", "admin_tls": True}


@story
async def test_peers_show_the_key_of_the_admin_side_and_trust_its_certificate(certificate, monkeypatch):
    key = {"authorization": "Bearer 0123456789abcdef"}
    monkeypatch.setenv("ADMIN_KEY", "0123456789abcdef")
    monkeypatch.setenv("OTHER_KEY", "fedcba9876543210")
    tls = {"tls_cert": certificate.cert, "tls_key": certificate.key, "worker_ca": certificate.cert}
    (port,) = free_ports(1)
    peer = (f"https://127.0.0.1:{port}",)
    async with (
        gateways({"admin_port": port, "peer": ("http://127.0.0.1:1",)}, **KEYED, **tls) as (one,),
        beside(one, peer=peer) as friend,
        beside(one, peer=peer, admin_key_env="OTHER_KEY") as stranger,
    ):
        await eventually(lambda: friend.metric("peer_messages_total", peer="peer-0", outcome="taken") > 0)
        await eventually(lambda: stranger.metric("peer_messages_total", peer="peer-0", outcome="refused") > 0)
        seen = await peers(one, verify=certificate.trusting, headers=key)
        assert len(seen["others"]) == 1
        assert seen["peers"][0]["problem"] == "peer-0 refused the connection"


@story
async def test_a_gateway_without_peers_takes_no_message_and_says_so():
    async with gateways({"peer": ()}) as (one,), beside(one, peer=(one.admin_url,)) as other:
        await eventually(lambda: other.metric("peer_messages_total", peer="peer-0", outcome="refused") > 0)
        problem = (await peers(other))["peers"][0]["problem"]
        assert problem == "it answered 409: this gateway exchanges nothing with others; start it with --peer"
        assert (await peers(one))["error"]["code"] == "refused"


@story
async def test_what_is_no_message_is_refused():
    async with gateways({}) as (one,), httpx.AsyncClient(base_url=one.admin_url) as admin:
        media = {"content-type": MEDIA}
        large = await admin.post("/peers", content=bytes(MAX_MESSAGE_BYTES + 1), headers=media)
        assert large.status_code == 413
        assert (await admin.post("/peers", json={})).status_code == 415
        for content in (b"", b"\xc1", b"\x91" * 100_000, msgspec.msgpack.encode({"version": 2})):
            reply = await admin.post("/peers", content=content, headers=media)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"]
        assert (await peers(one))["others"] == []


@story
async def test_marginal_knows_what_requests_at_other_gateways_use():
    geometry = ModelGeometry(layers=2, experts=4, top_k=1)
    counts = ExpertCounts(geometry, np.array([[3, 0, 0, 0], [0, 3, 0, 0]], np.uint16), tokens=3, covered=3)
    marginal = {"decode_policy": "marginal"}
    async with gateways(marginal, marginal, counts=counts) as (one, other), contextlib.AsyncExitStack() as stack:
        await stream(one, stack)
        await eventually(lambda: total(other) == 1)  # or it might choose the same worker
        await stream(other, stack)
        await eventually(lambda: used(one) == used(other) == [(1, 2.0), (1, 2.0)])


def used(one: Cluster) -> list[tuple[int, float]]:
    """Requests and active experts of each decode worker, as its policy knows them."""
    batches = one.gateway.decode.policy._pool.batches
    return [(int(n), round(active, 3)) for n, active in zip(batches.requests, batches.active, strict=True)]
