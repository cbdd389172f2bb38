"""Clients and slots by NIXL, without NIXL: what they do with their states, where tests say when transfers are done."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from coterie.clock import ManualClock
from coterie.errors import EngineError, GoneError, UnsupportedError, WireError
from coterie.experts.client import connections, nixl_tries
from coterie.experts.protocol import Reply, Request, SlotShape, State, Status, Word
from coterie.experts.protocol.rules import state_word
from coterie.experts.transport.nixl import NixlClient, NixlServer, agent, client, copy, handshake, server
from coterie.experts.transport.nixl.handshake import Invitation
from coterie.experts.transport.pending import FullError
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


def test_a_client_whose_agent_does_not_close_leaves_its_slot_all_the_same(network, monkeypatch):
    def fail():
        raise RuntimeError("busy")

    monkeypatch.setattr(client, "Agent", lambda name: SimpleNamespace(close=fail))
    one = NixlClient("http://x:1", "00" * 16, "a")
    with pytest.raises(RuntimeError, match="busy"):
        one.close()
    assert not one._hold.is_open


def test_where_no_slot_is_given_the_agent_is_closed(network, monkeypatch):
    closed = []

    def refuse(*_):
        raise EngineError("full")

    monkeypatch.setattr(client, "Hold", refuse)
    monkeypatch.setattr(client, "Agent", lambda name: SimpleNamespace(close=lambda: closed.append(name)))
    with pytest.raises(EngineError, match="full"):
        NixlClient("http://x:1", "00" * 16, "a")
    assert len(closed) == 1


def test_an_agent_ends_all_though_one_transfer_does_not(caplog):
    ended = []

    def release():
        ended.append("release")
        raise RuntimeError("under way")

    nixl = SimpleNamespace(deregister_memory=ended.append)
    transfers = [agent.Transfer(nixl, SimpleNamespace(release=release)) for _ in range(2)]
    agent._end(nixl, transfers, ["memory"])
    assert ended == ["release", "release", "memory"]
    assert caplog.messages == ["NIXL does not give up a transfer: under way"] * 2


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
        one.claim(now_s := time.monotonic())
        one.release(0, now_s + 1000)
        seen = one._agent.looks
        until(lambda: one._agent.looks > seen + 2)


def test_a_thread_that_looks_at_no_slot_sleeps_and_is_woken_by_a_client(monkeypatch):
    monkeypatch.setattr(server, "REST_S", 0.0)
    with contextlib.closing(slots()) as one:
        one.claim(now_s := time.monotonic())
        one.release(0, now_s)
        until(lambda: not one._wake.is_set())
        one.claim(now_s)
        seen = one._agent.looks
        until(lambda: one._agent.looks > seen + 2)


def test_no_late_request_of_a_client_has_a_number_of_the_next_one():
    with contextlib.closing(slots()) as one:
        place = one.claim(time.monotonic())
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
        pending.look(time.monotonic() + 60)


# --- tries ----------------------------------------------------------------------------------------

SERVER = connections.Server("a", "x", "http://127.0.0.1:1")


class Tries:
    """Of connections, each of which ends as the test says."""

    def __init__(self, monkeypatch):
        self.clock, self.count, self.end = ManualClock(), 0, EngineError("no network")
        self._tries = nixl_tries.NixlTries(self.clock)
        monkeypatch.setattr(nixl_tries, "NixlClient", self._try)

    def _try(self, *_):
        self.count += 1
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    def connect(self, or_tcp):
        return self._tries.connect(SERVER, "00" * 16, or_tcp=or_tcp)


@pytest.fixture
def tries(monkeypatch):
    return Tries(monkeypatch)


@pytest.mark.parametrize("kind", [EngineError, UnsupportedError, WireError])
def test_where_nixl_fails_there_is_tcp_for_a_while_and_one_warning(tries, kind, caplog):
    tries.end = kind("no")
    for _ in range(3):
        assert tries.connect(or_tcp=True) is None
    assert tries.count == 1
    assert caplog.messages == ["expert server a cannot be reached by NIXL: no; by TCP for 60 s"]
    tries.clock.advance(nixl_tries.AGAIN_WITH_TCP_S)
    tries.end = "a link"
    assert tries.connect(or_tcp=True) == "a link"


def test_where_nixl_fails_without_tcp_the_error_says_what_to_do_and_costs_no_slot_for_a_while(tries):
    for _ in range(3):
        with pytest.raises(EngineError, match=r"reached by NIXL: no network; set UCX_TLS .* with --tcp-port"):
            tries.connect(or_tcp=False)
    assert tries.count == 1
    tries.clock.advance(nixl_tries.AGAIN_S)
    with pytest.raises(EngineError):
        tries.connect(or_tcp=False)
    assert tries.count == 2


@pytest.mark.parametrize("problem", [GoneError("gone"), FullError("full")])
def test_a_server_that_is_gone_or_full_is_not_one_that_nixl_fails(tries, problem):
    tries.end = problem
    for _ in range(2):
        with pytest.raises(type(problem), match=str(problem)):
            tries.connect(or_tcp=True)
    assert tries.count == 2


# --- handshakes -----------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def answering(*pieces):
    """A server that answers one request by these pieces, a hundredth of a second apart; yields its URL."""

    def answer():
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.recv(1 << 16)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


def test_an_answer_that_comes_in_drops_is_given_up(monkeypatch):
    monkeypatch.setattr(handshake, "ANSWER_S", 0.1)
    drops = [bytes([one]) for one in HEAD + b"\r\n" + msgspec.json.encode(INVITATION) + b"\n"]
    with answering(*drops) as url, pytest.raises(EngineError, match="server a cannot be reached"):
        handshake.Hold(url, "00" * 16, "a")


def test_a_connection_that_ends_with_the_invitation_holds_no_slot():
    body = msgspec.json.encode(INVITATION) + b"\n"
    with answering(HEAD + b"connection: close\r\n\r\n" + body) as url, pytest.raises(WireError, match="ends with it"):
        handshake.Hold(url, "00" * 16, "a")
