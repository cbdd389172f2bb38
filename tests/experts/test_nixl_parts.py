"""What the transport by NIXL does without NIXL: its sizes, its sleeps, and what it says where there is none."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import EngineError, UnsupportedError
from coterie.experts.client import connections
from coterie.experts.protocol import Dtype, Reply, Request, SlotShape, Status
from coterie.experts.protocol.layout import SlotMemory
from coterie.experts.server import process
from coterie.experts.transport.nixl import agent, client
from coterie.experts.transport.nixl.copy import _coarse
from coterie.experts.transport.nixl.pace import SHORTEST_S, Pace
from tiny_checkpoints import write_checkpoint

SHAPE = SlotShape(tokens=5, hidden=8, top_k=3, layers=2, experts=4)


def copied(pieces, memory):
    """A slot that has these pieces of another one, and ones elsewhere."""
    copy = bytearray(b"\xff" * SHAPE.size)
    for start, size in pieces:
        copy[start : start + size] = memory[start : start + size]
    return SlotMemory(SHAPE, memoryview(copy))


@given(st.integers(0, 5), st.integers(1, 3), st.sampled_from(Dtype))
def test_the_pieces_of_a_request_are_all_that_is_read_of_it(tokens, top_k, dtype):
    memory = bytearray(SHAPE.size)
    hidden = np.arange(tokens * 8).reshape(tokens, 8).astype(dtype.numpy)
    ids, weights = np.full((tokens, top_k), 3, np.int32), np.full((tokens, top_k), 0.5, np.float32)
    SlotMemory(SHAPE, memoryview(memory)).write_request(7, Request(1, 2, 3, hidden, ids, weights, dtype))
    number, read = copied(SHAPE.request_pieces(tokens, dtype), memory).read_request()
    assert (number, read.layer, read.epoch, read.owner, read.dtype) == (7, 1, 2, 3, dtype)
    for found, sent in ((read.hidden, hidden), (read.ids, ids), (read.weights, weights)):
        np.testing.assert_array_equal(found, sent)


@given(st.integers(0, 5), st.sampled_from(Dtype))
def test_the_pieces_of_a_reply_are_all_that_is_read_of_it(tokens, dtype):
    memory = bytearray(SHAPE.size)
    sums = np.arange(tokens * 8).reshape(tokens, 8).astype(dtype.numpy)
    SlotMemory(SHAPE, memoryview(memory)).write_reply(7, Reply(4, Status.COMPUTED, sums, dtype))
    number, read = copied(SHAPE.reply_pieces(tokens, dtype), memory).read_reply()
    assert (number, read.epoch, read.status, read.dtype) == (7, 4, Status.COMPUTED, dtype)
    np.testing.assert_array_equal(read.sums, sums)


@given(st.integers(1, 1 << 24))
def test_a_transfer_is_at_most_a_fourth_larger_than_need_be(count):
    assert count <= _coarse(count) <= count * 5 / 4


def test_there_are_few_sizes_of_transfers():
    assert len({_coarse(count) for count in range(4097)}) == 7 + 4 * 9 + 1  # 1 to 7, four to each power of two, 4096


@given(st.floats(0, 10), st.floats(0, 10))
def test_a_wait_is_an_eighth_longer_than_need_be_at_most(since_s, waited_s):
    pace = Pace(0.001, 0.0)
    pace.reset(since_s)
    sleep_s = pace.sleep_s(since_s + waited_s)
    assert SHORTEST_S <= sleep_s <= 0.001
    assert sleep_s <= max(SHORTEST_S, waited_s / 8 * 1.001)


@pytest.fixture
def no_nixl(monkeypatch):
    """It cannot be loaded."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    agent._nixl.cache_clear()


@pytest.mark.usefixtures("no_nixl")
def test_where_there_is_no_nixl_a_server_does_not_start_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SharedServer", None)  # that nothing is left behind in /dev/shm
    checkpoint = write_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(UnsupportedError, match=r"pip install 'coterie\[nixl\]'"):
        process.ServerProcess(process.ServeConfig(checkpoint, nixl=True))


@pytest.mark.usefixtures("no_nixl")
def test_a_client_whose_nixl_cannot_be_loaded_says_so_of_the_server(monkeypatch):
    offer = connections.Offer(id="00" * 16, shared_memory="x", tcp=None, nixl=True)
    monkeypatch.setattr(connections, "ask", lambda *_, **__: offer)
    monkeypatch.setattr(connections.nixl, "is_installed", lambda: True)
    monkeypatch.setattr(client, "Hold", None)  # no slot is taken
    with pytest.raises(EngineError, match=r"server a cannot be reached by NIXL: NIXL cannot be loaded: .*pip install"):
        connections.Connector("00" * 16)._from_afar(connections.Server("a", "x", "http://127.0.0.1:1"))
