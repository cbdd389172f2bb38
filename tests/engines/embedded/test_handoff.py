"""KV from one cache to another: equal bytes by either way, and no copy that was not the prompt's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.embedded import kv_server
from coterie.engines.embedded.kept import KeptTable
from coterie.engines.embedded.kv import PREFIX, KvFile, NeighbourFile, kv_kind
from coterie.engines.embedded.kv_server import KvServer
from coterie.engines.embedded.messages import Message, Operation, RemoteKv, Status, read_answer, read_message
from coterie.engines.embedded.pulls import Puller
from coterie.errors import ConfigError, WireError
from coterie.shm import FOLDER

SHAPE = (12, 3, 8, 5)
KIND = kv_kind("model", SHAPE)


class Pair:
    """A holder with a lease on three blocks, and a worker that wants them."""

    def __init__(self, transport="auto", *, kind=KIND, deadline_s=5.0, patience_s=5.0):
        self.ours, self.theirs = KvFile(SHAPE, kind), KvFile(SHAPE, KIND)
        self.theirs.array[:] = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
        self.leases = KeptTable(30.0)
        self.leases.keep("cmpl-1", (7, 0, 11), 20, 0.0)
        self.server = KvServer(self.theirs, self, patience_s=patience_s)
        self.transport, self.deadline_s = transport, deadline_s
        self.ended = asyncio.Event()

    def handoff(self, request_id):
        return self.leases.find(request_id)

    def release_handoff(self, request_id):
        self.ended.set()
        return self.leases.release(request_id)

    async def __aenter__(self):
        await self.server.start("127.0.0.1", 0)
        self.puller = Puller(self.ours, self.transport, self.deadline_s)
        return self

    async def __aexit__(self, *_):
        await self.puller.close()
        await self.server.close()
        close(self.ours)
        close(self.theirs)

    def remote(self, **changes):
        port, engine = self.server.port, self.theirs.engine_id
        return dataclasses.replace(RemoteKv("127.0.0.1", port, engine, "cmpl-1", (7, 0, 11), 20), **changes)

    async def pull(self, remote=None, first=0, blocks=(1, 2, 3)):
        ended = asyncio.get_running_loop().create_future()
        self.puller.start(remote or self.remote(), first, blocks, ended.set_result)
        return await ended


def close(kv):
    kv.close()
    assert not Path(FOLDER, PREFIX + kv.engine_id).exists()


async def keep_silent(reader, writer):
    """A holder that takes everything in and never answers."""
    await reader.read()
    writer.close()


def descriptors():
    """Open ones, without those of mappings, which go with the last array that shows them."""
    return Counter(link for link in map(link_of, os.listdir("/proc/self/fd")) if PREFIX not in link)


def link_of(number):
    with contextlib.suppress(FileNotFoundError):  # that of the listing itself
        return os.readlink(f"/proc/self/fd/{number}")
    return PREFIX


def run(coroutine):
    before = descriptors()
    asyncio.run(coroutine)
    assert not descriptors() - before  # earlier tests' may be closed meanwhile


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
def test_pulled_blocks_equal_those_of_the_holder_and_the_lease_ends(transport):
    async def story():
        async with Pair(transport) as pair:
            assert await pair.pull() is None
            assert pair.ours.array[[1, 2, 3]].tobytes() == pair.theirs.array[[7, 0, 11]].tobytes()
            assert not pair.ours.array[[0, *range(4, 12)]].any()
            assert [kept.blocks for kept in pair.leases.collect(0.0)] == [(7, 0, 11)]

    run(story())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_blocks_that_are_here_already_or_not_needed_are_not_copied(transport):
    async def story():
        async with Pair(transport) as pair:
            assert await pair.pull(first=1, blocks=(4,)) is None
            assert pair.ours.array[4].tobytes() == pair.theirs.array[0].tobytes()
            assert not pair.ours.array[[*range(4), *range(5, 12)]].any()
            pair.leases.keep("cmpl-1", (7, 0, 11), 20, 0.0)
            assert await pair.pull(first=3, blocks=()) is None
            assert len(pair.leases) == 0

    run(story())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pull_fails_when_the_lease_has_ended(transport):
    async def story():
        async with Pair(transport) as pair:
            assert pair.leases.collect(31.0)[0].blocks == (7, 0, 11)
            assert "no longer holds the KV" in await pair.pull()

    run(story())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_lease_that_ends_during_the_copy_makes_the_pull_fail(transport, monkeypatch):
    async def story():
        async with Pair(transport) as pair:
            ask = Message.encode

            def expire_before_done(message):
                if message.operation is Operation.DONE:
                    pair.leases.collect(31.0)
                return ask(message)

            monkeypatch.setattr(Message, "encode", expire_before_done)
            assert "no longer holds the KV" in await pair.pull()

    run(story())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"blocks": (7, 0, 10)}, "the blocks are not those"),
        ({"engine_id": "0" * 32}, "was started anew"),
        ({"request_id": "other"}, "no longer holds"),
    ],
)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_is_not_exactly_the_lease_is_refused_and_leaves_it_held(changes, problem, transport):
    async def story():
        async with Pair(transport) as pair:
            assert problem in await pair.pull(pair.remote(**changes))
            assert pair.leases.find("cmpl-1") is not None

    run(story())


def test_a_pull_of_more_than_there_is_fails():
    async def story():
        async with Pair() as pair:
            assert "3 blocks, but 4 are needed" in await pair.pull(first=1)

    run(story())


def test_another_model_is_refused_even_where_its_blocks_have_the_same_size():
    async def story():
        async with Pair(kind=kv_kind("other model", SHAPE)) as pair:
            assert "another model" in await pair.pull()

    run(story())


def test_shared_memory_can_be_demanded_where_there_is_none():
    async def story():
        async with Pair("shm") as pair:
            pair.theirs.close()  # unlinked, as seen from another host
            assert "shared memory cannot be opened" in await pair.pull()

    run(story())


def test_a_drop_ends_the_lease_without_a_copy():
    async def story():
        async with Pair() as pair:
            pair.puller.drop(pair.remote())
            await asyncio.wait_for(pair.ended.wait(), 5)
            assert len(pair.leases) == 0
            assert not pair.ours.array.any()

    run(story())


def test_a_holder_that_is_gone_or_silent_fails_the_pull_in_time():
    async def story():
        async with Pair(deadline_s=0.2) as pair:
            silent = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
            port = silent.sockets[0].getsockname()[1]
            assert "not received within 0.2 s" in await pair.pull(pair.remote(port=port))
            silent.close()
            await pair.server.close()
            assert "connection to the prefill worker failed" in await pair.pull()

    run(story())


@pytest.mark.parametrize("host", ["a..b", "x" * 200, ".", "\0", "no such host"])
def test_what_is_no_host_fails_the_pull_and_says_so(host):
    async def story():
        async with Pair() as pair:
            problem = await pair.pull(pair.remote(host=host))
            assert "no name of a host" in problem or "connection to the prefill worker failed" in problem

    run(story())


def test_a_pull_under_way_fails_when_the_worker_stops():
    async def story():
        async with Pair(deadline_s=60) as pair:
            silent = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
            port = silent.sockets[0].getsockname()[1]
            pulling = asyncio.create_task(pair.pull(pair.remote(port=port)))
            await asyncio.sleep(0.01)
            await pair.puller.close()
            assert "broken off" in await pulling
            silent.close()

    run(story())


def test_peers_that_send_nonsense_or_nothing_are_dropped():
    async def story():
        async with Pair(patience_s=0.2) as pair:
            for sent in (
                b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60,
                b"CTKV",
                b"",
                struct.pack(">4sBB", b"CTKV", 1, 9) + b"x" * 60,
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
                writer.write(sent)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
                writer.close()
            assert pair.leases.find("cmpl-1") is not None

    run(story())


async def idle_connections(port, number):
    return [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(number)]


@pytest.mark.parametrize("freed", [True, False], ids=["freed", "held"])
def test_a_connection_beyond_the_most_at_once_waits_for_one_to_end(freed, monkeypatch):
    monkeypatch.setattr(kv_server, "_MOST_AT_ONCE", 3)

    async def story():
        async with Pair("tcp", deadline_s=0.3) as pair:
            idle = await idle_connections(pair.server.port, 3)
            pulling = asyncio.create_task(pair.pull())
            await asyncio.sleep(0.05)
            assert not pulling.done()
            if freed:
                idle[1].close()
                assert await pulling is None
                assert pair.ours.array[[1, 2, 3]].tobytes() == pair.theirs.array[[7, 0, 11]].tobytes()
            else:
                assert "not received within 0.3 s" in await pulling
                assert pair.leases.find("cmpl-1") is not None
            for writer in idle:
                writer.close()

    run(story())


def test_idle_connections_give_their_places_up_in_time(monkeypatch):
    monkeypatch.setattr(kv_server, "_MOST_AT_ONCE", 3)

    async def story():
        async with Pair("tcp", patience_s=0.1) as pair:
            idle = await idle_connections(pair.server.port, 3)
            assert await pair.pull() is None
            for writer in idle:
                writer.close()

    run(story())


def test_a_port_that_is_taken_is_named():
    async def story():
        async with Pair() as pair:
            with pytest.raises(ConfigError, match="choose another --kv-port"):
                await KvServer(pair.theirs, pair, patience_s=1.0).start("127.0.0.1", pair.server.port)

    run(story())


# --- the parts -----------------------------------------------------------------------------------------


def read_back(data: bytes):
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader)

    return asyncio.run(read())


def test_a_message_is_read_as_it_was_written():
    message = Message(Operation.READ, "0f" * 16, b"k" * 16, "cmpl-é", 1, 2, (5, 1 << 31))
    assert read_back(message.encode()) == message
    assert read_back(b"") is None


@given(st.binary(min_size=1, max_size=120))
def test_any_bytes_are_a_message_an_error_or_an_end(data):
    start = Message(Operation.DONE, "0f" * 16, b"k" * 16, "id", 0, 0, (5,)).encode()
    for sent in (data, start[: len(data)] + data):
        with contextlib.suppress(WireError, asyncio.IncompleteReadError):
            read_back(sent)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">4sBBQ", b"HTTP", 1, 0, 8),
        struct.pack(">4sBBQ", b"CTKV", 1, 77, 0),
        struct.pack(">4sBBQ", b"CTKV", 1, Status.HELD, 1 << 60),
        struct.pack(">4sBBQ", b"CTKV", 1, Status.GONE, 8),
    ],
)
def test_an_answer_of_another_size_or_kind_is_an_error(head):
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(head)
        return await read_answer(reader, 8)

    with pytest.raises(WireError):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"engine_id": "../../etc/passwd"}, "remote_engine_id"),
        ({"engine_id": "0" * 31 + "\n"}, "remote_engine_id"),
        ({"request_id": ""}, "remote_request_id"),
        ({"request_id": "x" * 257}, "remote_request_id"),
        ({"blocks": (-1,)}, "remote_block_ids"),
        ({"blocks": (0,) * 70_000}, "remote_block_ids"),
    ],
)
def test_what_a_client_may_not_name_as_remote_kv_is_refused(changes, problem):
    remote = RemoteKv("127.0.0.1", 1, "0" * 32, "id", (1,), 1)
    with pytest.raises(WireError, match=problem):
        dataclasses.replace(remote, **changes)


def test_a_neighbour_opens_only_a_file_of_that_engine_kind_and_size(tmp_path):
    kv = KvFile(SHAPE, KIND, folder=str(tmp_path))
    block_bytes = kv.bytes.shape[1]
    folder = str(tmp_path)
    assert NeighbourFile.open(kv.engine_id, b"other kind......", block_bytes, folder=folder) is None
    assert NeighbourFile.open(kv.engine_id, KIND, block_bytes * 2, folder=folder) is None
    assert NeighbourFile.open("0" * 32, KIND, block_bytes, folder=folder) is None
    Path(folder, PREFIX + "1" * 32).symlink_to(tmp_path / (PREFIX + kv.engine_id))
    assert NeighbourFile.open("1" * 32, KIND, block_bytes, folder=folder) is None
    with NeighbourFile.open(kv.engine_id, KIND, block_bytes, folder=folder) as file:
        kv.array[11] = 3.0
        kv.close()
        into = np.zeros(block_bytes, np.uint8)
        file.read(11, into)
        assert (into.view(np.float32) == 3.0).all()
        with pytest.raises(Exception, match="not among the 12"):
            file.read(12, into)
