"""Clients and slots by NIXL, without NIXL: what they do with their states, where a test says when transfers are done."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.errors import EngineError, UnsupportedError, WireError
from coterie.experts.client import connections
from coterie.experts.protocol import Reply, Request, SlotShape, State, Status, Word
from coterie.experts.protocol.rules import state_word
from coterie.experts.transport.nixl import NixlClient, NixlServer, client, copy, server
from coterie.experts.transport.nixl.handshake import Invitation
from running_monitor import until

SHAPE = SlotShape(tokens=4, hidden=8, top_k=2, layers=2, experts=4)
HUGE = SlotShape(tokens=1 << 24, hidden=1 << 24, top_k=4096, layers=2, experts=4096)  # 2^51 bytes
INVITATION = Invitation("00" * 16, b"", 0, 10, SHAPE)


def request(value=1.0):
    ids, weights = np.zeros((1, 2), np.int32), np.ones((1, 2), np.float32)
    return Request(0, 0, 7, np.full((1, SHAPE.hidden), value, np.float32), ids, weights)


# --- a client -------------------------------------------------------------------------------------


class Network:
    """Whether transfers are done, for all slots."""

    def __init__(self):
        self.works = True


class FakeSlot:
    """A slot whose server answers at once, with the hidden states."""

    def __init__(self, network):
        self._network, self._word, self._request = network, 0, None
        self.load = self

    def start(self):
        pass

    def is_done(self):
        return self._network.works

    def write(self, sequence, request):
        self._request = sequence, request
        return self

    def store(self, state, sequence):
        self._word = state_word(State.DONE if state == State.READY else state, sequence)
        return self

    def loaded(self):
        return self._word

    def read(self, dtype, tokens):
        return self

    def reply(self):
        sequence, request = self._request
        return sequence, Reply(5, Status.COMPUTED, request.hidden)


class FakeHold:
    def __init__(self, *_):
        self.invitation, self.is_open = INVITATION, True

    def check(self):
        pass

    def close(self):
        self.is_open = False


@pytest.fixture
def network(monkeypatch):
    """What clients reach their servers by."""
    network = Network()
    monkeypatch.setattr(client, "Hold", FakeHold)
    monkeypatch.setattr(client, "Agent", lambda name: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(client, "SlotCopy", lambda agent, invitation: FakeSlot(network))
    return network


def test_a_reply_that_came_while_another_was_waited_for_is_forgotten_with_its_request(network):
    unsent = set()
    first, other = (NixlClient("http://x:1", "00" * 16, name, unsent) for name in "ab")
    network.works = False
    posted = first.post(request(3))
    others = other.post(request(4))
    assert posted.look(0) is None
    network.works = True
    assert (others.look(0).sums == 4).all()  # it sends for both, and takes what it finds
    posted.withdraw()
    network.works = False
    second = first.post(request(5))
    assert second.look(0) is None
    network.works = True
    assert (second.look(0).sums == 5).all()
    assert (first.post(request(6)).look(0).sums == 6).all()


def test_a_reply_that_came_while_another_was_waited_for_is_taken_by_who_asked(network):
    unsent = set()
    first, other = (NixlClient("http://x:1", "00" * 16, name, unsent) for name in "ab")
    network.works = False
    posted, others = first.post(request(3)), other.post(request(4))
    network.works = True
    others.look(0)
    network.works = False
    assert (posted.look(0).sums == 3).all()


# --- slots ----------------------------------------------------------------------------------------


class FakeAgent:
    name = "00" * 16

    def __init__(self):
        self.looks = 0

    def register(self, region):
        pass

    def invitation(self, place):
        return b""

    def progress(self):
        self.looks += 1

    def close(self):
        pass


def slots(shape=SHAPE):
    return NixlServer(FakeAgent(), SimpleNamespace(shape=shape, ring=lambda: None), 1)


def test_what_a_client_has_written_is_served_while_its_slot_rests():
    with contextlib.closing(slots()) as one:
        one.claim(now_s := server.time.monotonic())
        one.release(0, now_s + 1000)
        seen = one._agent.looks
        until(lambda: one._agent.looks > seen + 2)


def test_a_thread_that_looks_at_no_slot_sleeps_and_is_woken_by_a_client(monkeypatch):
    monkeypatch.setattr(server, "REST_S", 0.0)
    with contextlib.closing(slots()) as one:
        one.claim(now_s := server.time.monotonic())
        one.release(0, now_s)
        until(lambda: not one._wake.is_set())
        one.claim(now_s)
        seen = one._agent.looks
        until(lambda: one._agent.looks > seen + 2)


def test_no_late_request_of_a_client_has_a_number_of_the_next_one():
    with contextlib.closing(slots()) as one:
        place = one.claim(server.time.monotonic())
        slot = one._slots[place]
        for last in (7, (1 << 56) - 1):  # whatever the client wrote there
            slot.swap(Word.STATE, slot.load(Word.STATE), state_word(State.READY, last))
            one.release(place, 0.0)
            first = one.invite(place).sequence + 1
            assert not {*range(last, last + 1000)} & {*range(first, first + 1000)}
            assert first < 1 << 48


# --- sizes ----------------------------------------------------------------------------------------


def test_a_server_with_more_slots_than_memory_says_what_to_do():
    with pytest.raises(UnsupportedError, match=r"bytes for slots by NIXL: .*fewer --slots, or --max-tokens"):
        slots(HUGE)


def test_an_invitation_to_a_slot_larger_than_memory_is_refused():
    with pytest.raises(WireError, match=r"invitation: to a slot of \d+ bytes"):
        copy.SlotCopy(FakeAgent(), Invitation("00" * 16, b"", 0, 0, HUGE))


def test_whatever_goes_wrong_in_connecting_is_an_error_of_the_server():
    def connect():
        raise OverflowError("too large")

    pending = connections._LateLink(connect).post(request())
    with pytest.raises(EngineError, match=r"connecting failed: OverflowError\('too large'\)"):
        pending.look(server.time.monotonic() + 60)
