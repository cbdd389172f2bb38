"""Requests by NIXL over UCX's shared memory and TCP: real agents and processes, and peers that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from threading import Event, Thread

import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from coterie.errors import EngineError, GoneError, WireError
from coterie.experts.protocol import State, Word
from coterie.experts.server.nixl_slots import slot_for
from coterie.experts.transport.nixl import Agent, NixlClient, NixlServer, handshake, server
from coterie.http_server import listen, serving_app, url_of
from link_laws import LinkLaws
from running_monitor import until
from stepped_server import DEADLINE_S, LARGE, SHAPE, SteppedServer, doubled, request

pytestmark = pytest.mark.usefixtures("nixl")
ID = "0123456789abcdef" * 2
WAYS = {"shm": "posix,sysv,cma,self,tcp", "tcp": "tcp"}


@pytest.fixture(params=WAYS, autouse=True)
def way(request, monkeypatch):
    """What UCX may use."""
    monkeypatch.setenv("UCX_TLS", WAYS[request.param])
    return request.param


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    """Slots are free at once."""
    monkeypatch.setattr(server, "REST_S", 0.0)


@contextlib.contextmanager
def app_of(app, ended=None):
    """Serves an application in a thread; yields its URL."""
    loop, ended, ready = asyncio.new_event_loop(), ended or asyncio.Event(), Event()

    async def answer():
        async with serving_app(app, listener, grace_s=2):
            ready.set()
            await ended.wait()

    def run():
        loop.run_until_complete(answer())
        loop.close()

    with listen("127.0.0.1", 0, "port") as listener:
        thread = Thread(target=run)
        thread.start()
        ready.wait(DEADLINE_S)
        try:
            yield url_of(listener)
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()


class Serving(SteppedServer):
    """A server of both transports, which the test runs step by step, or a thread."""

    def open_other(self, slots):
        self.ended, self.url = asyncio.Event(), ""
        return NixlServer(Agent(ID), self.shared, slots)

    def has(self, client, pending):  # which sends on meanwhile
        return super().has(client, pending) and not client._unsent

    def forgot(self, client):
        client.go_on()
        return super().forgot(client)

    @property
    def app(self):
        async def slot(request):
            return slot_for(self.other, ID, request.query_params.get("server"), self.ended)

        return Starlette(routes=[Route(handshake.PATH, slot)])

    def client(self, unsent=None):
        return NixlClient(self.url, ID, "x", unsent)


@contextlib.contextmanager
def serving(shape=SHAPE, slots=2, compute=None):
    with Serving(shape, slots).running(compute) as one, app_of(one.app, one.ended) as one.url:
        yield one


@pytest.fixture
def idle():
    """A server that computes only where the test says so."""
    with serving() as one:
        yield one


@pytest.fixture
def busy():
    """A server that a thread runs."""
    with serving(compute=doubled) as one:
        yield one


class TestNixl(LinkLaws):
    full = "no slot for NIXL is free"


def test_a_request_that_its_client_withdrew_is_not_computed(idle):
    client = idle.client()
    first = client.post(request())
    until(lambda: idle.has(client, first))
    first.withdraw()
    until(lambda: (client.go_on(), not idle.intake.waiting)[1])
    pending = client.post(request(4))
    until(lambda: idle.has(client, pending))
    assert idle.intake.step(doubled, 1) == 1
    assert (pending.wait(time.monotonic() + DEADLINE_S).sums == 8).all()
    client.close()


def test_a_slot_rests_before_it_is_given_to_another_client(monkeypatch):
    monkeypatch.setattr(server, "REST_S", 5.0)
    with serving(slots=1) as one:
        assert one.other.claim(100.0) == 0
        one.other.release(0, 200.0)
        assert one.other.claim(204.9) is None
        assert one.other.claim(205.0) == 0


def test_the_next_client_of_a_slot_has_numbers_that_the_last_one_has_not(busy):
    first = busy.client()
    for _ in range(3):
        first.call(request(), DEADLINE_S)
    first.close()
    until(lambda: not busy.other.clients)
    for place in (1, 0):  # the slot that was free for longest comes first
        assert busy.other.claim(time.monotonic()) == place
        assert busy.other.invite(place).sequence == server._SKIPPED + (server._SKIPPED + 3 if place == 0 else 0)


def test_a_client_that_means_another_server_is_told_so(idle):
    with pytest.raises(GoneError, match="another one has its URL"):
        NixlClient(idle.url, secrets.token_hex(16), "x")


def test_where_nobody_listens_there_is_one_error():
    with listen("127.0.0.1", 0, "port") as listener:
        url = url_of(listener)
    with pytest.raises(EngineError, match="server x cannot be reached"):
        NixlClient(url, ID, "x")


# --- large pieces ---------------------------------------------------------------------------------


def test_large_requests_and_replies_arrive_whole():
    rng = np.random.default_rng(0)
    with serving(LARGE, compute=doubled) as one:
        client = one.client()
        for tokens in (4096, 1000):
            sent = request(shape=LARGE, tokens=tokens)
            sent.hidden[:] = rng.standard_normal(sent.hidden.shape, np.float32)
            np.testing.assert_array_equal(client.call(sent, DEADLINE_S).sums, 2 * sent.hidden)
        client.close()


@contextlib.contextmanager
def deaf(*servers, monkeypatch):
    """Servers that serve no transfers meanwhile."""
    hears = Event()
    with monkeypatch.context() as patch:
        for one in servers:
            patch.setattr(one.other, "_look", lambda pace: hears.wait(DEADLINE_S))
        try:
            yield
        finally:
            hears.set()


def test_who_waits_for_one_server_sends_on_to_the_others(monkeypatch):
    with serving(LARGE) as first, serving(LARGE) as second:
        unsent = set()
        clients = [one.client(unsent) for one in (first, second)]
        with deaf(first, second, monkeypatch=monkeypatch):
            pending = [client.post(request(shape=LARGE, tokens=4096)) for client in clients]
            stuck = len(unsent)
        until(lambda: pending[0].look(time.monotonic() + 0.01) is None and not unsent)
        assert clients[1]._problem is None
        until(lambda: second.intake.waiting)
        assert stuck or os.environ["UCX_TLS"] != "tcp", "all went at once; the test shows nothing"
        for client in clients:
            client.close()


def test_a_large_request_that_was_withdrawn_on_its_way_never_mixes_with_the_next(monkeypatch):
    with serving(LARGE) as one:
        client = one.client()
        large = request(3, shape=LARGE, tokens=4096)
        with deaf(one, monkeypatch=monkeypatch):
            client.post(large).withdraw()
            large.hidden[:] = np.nan  # the caller's memory is its own again
            client.post(request(9, shape=LARGE)).withdraw()
            last = client.post(request(4, shape=LARGE, tokens=2))
        seen = []

        def compute(requests):
            seen.extend((one.hidden.min(), one.hidden.max()) for one in requests)
            return doubled(requests)

        until(lambda: (last.look(0), one.intake.step(compute, 0.01))[0] is not None)
        assert seen[-1] == (4, 4)
        assert set(seen) <= {(3, 3), (4, 4), (9, 9)}
        assert one.intake.malformed == 0
        client.close()


# --- peers that break the protocol ----------------------------------------------------------------


def write(client, data, start=64):
    """Write bytes to a client's slot, then say that there is a request."""
    slot = client._slot
    slot._memory[start : start + len(data)] = data
    client._sequence += 1
    transfers = [slot.transfer("WRITE", [(start, len(data))]), slot.store(State.READY, client._sequence)]
    for transfer in transfers:
        transfer.start()
        until(transfer.is_done)


def state(client):
    client._slot.load.start()
    until(client._slot.load.is_done)
    return client._slot.loaded() & 0xFF


@pytest.mark.parametrize(
    "data", [b"\xff" * 64, bytes(64), np.random.default_rng(0).bytes(500)], ids=["ones", "zeros", "random"]
)
def test_who_writes_nonsense_gets_a_refusal_and_others_are_served(busy, data, caplog):
    nonsense, good = busy.client(), busy.client()
    write(nonsense, data)
    until(lambda: state(nonsense) == State.DONE)
    assert busy.intake.malformed == 1
    assert "refused" in caplog.text
    assert (good.call(request(3), DEADLINE_S).sums == 6).all()
    assert (nonsense.call(request(4), DEADLINE_S).sums == 8).all()
    for client in (nonsense, good):
        client.close()


def test_who_writes_over_all_of_its_slot_harms_none_of_its_next_clients(busy):
    vandal = busy.client()
    write(vandal, b"\xff" * SHAPE.size, start=0)
    vandal._slot._memory[:24] = b"\xff" * 24
    store = vandal._slot.transfer("WRITE", [(0, 24)])
    store.start()
    until(store.is_done)
    assert busy.intake.clients == 1
    vandal.close()
    until(lambda: not busy.intake.clients)
    clients = [busy.client() for _ in range(2)]
    assert [client.call(request(3), DEADLINE_S).sums.max() for client in clients] == [6, 6]
    assert busy.intake.clients == 2
    for client in clients:
        client.close()


def test_a_server_that_can_look_at_its_slots_no_more_says_so(idle):
    def fail():
        raise OSError("no network")

    idle.other._agent.progress = fail
    idle.other.claim(time.monotonic())  # so that it looks
    with pytest.raises(EngineError, match=r"looks at its slots for NIXL no more: OSError\('no network'\)"):
        until(lambda: idle.intake.step(doubled, 1))


def test_a_reply_that_names_another_request_is_not_taken(idle):
    client = idle.client()
    pending = client.post(request())
    until(lambda: idle.has(client, pending))
    slot = next(iter(idle.other._slots))
    slot.write_reply(77, doubled([request()])[0])
    number = client._sequence
    assert slot.swap(Word.STATE, number << 8 | State.READY, number << 8 | State.DONE)
    with pytest.raises(WireError, match=f"reply to request 77 in the place of that to {number}"):
        pending.wait(time.monotonic() + DEADLINE_S)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"metadata": b"nonsense"}, WireError, "cannot read the other side's metadata"),
        ({"metadata": b""}, WireError, "cannot read the other side's metadata"),
        ({"address": 4096}, EngineError, "cannot prepare"),
        ({"server": "another"}, GoneError, "another one has its URL"),
    ],
)
def test_an_invitation_is_checked(idle, changes, error, message, monkeypatch):
    invite = idle.other.invite
    monkeypatch.setattr(idle.other, "invite", lambda place: msgspec.structs.replace(invite(place), **changes))
    with pytest.raises(error, match=message):
        idle.client()
    until(lambda: not idle.other.clients)


@pytest.mark.parametrize("line", [b"", b"[]", b"{" * 100_000, b'"' + b"x" * (2 << 20), b"\xff\xfe"], ids=range(5))
def test_an_answer_that_is_no_invitation_is_refused(line):
    async def answer(request):
        return Response(line)

    with app_of(Starlette(routes=[Route(handshake.PATH, answer)])) as url, pytest.raises(WireError, match="invitation"):
        NixlClient(url, ID, "x")


# --- ends -----------------------------------------------------------------------------------------


def test_a_client_whose_process_is_killed_leaves_its_slot(idle):
    code = "import sys, time; from coterie.experts.transport.nixl import NixlClient as C; c = C(*sys.argv[1:]); "
    command = [sys.executable, "-c", code + "print(1, flush=True); time.sleep(100)", idle.url, ID, "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        assert idle.other.clients == 1
        process.kill()
    until(lambda: not idle.other.clients)


def test_nobody_looks_at_slots_that_nobody_has(idle):
    looks = []
    look = idle.other._look
    idle.other._look = lambda pace: (looks.append(1), look(pace))
    idle.client().close()
    until(lambda: not idle.other.clients)
    until(lambda: looks)
    time.sleep(0.05)  # the last look ends
    count = len(looks)
    time.sleep(0.2)
    assert len(looks) == count


def test_a_server_that_ends_is_seen_at_once():
    with serving() as one:
        client = one.client()
        pending = client.post(request())
    with pytest.raises(EngineError, match="connection lost"):
        pending.wait(time.monotonic() + DEADLINE_S)
