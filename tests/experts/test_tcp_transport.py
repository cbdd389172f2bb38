"""Requests by TCP: real sockets, real processes, and peers that break the protocol."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from coterie.errors import EngineError, GoneError, WireError
from coterie.experts.protocol import Status, frames
from coterie.experts.transport.tcp import TcpClient, TcpServer, server
from link_laws import LinkLaws
from running_monitor import until
from stepped_server import DEADLINE_S, LARGE, SHAPE, SteppedServer, doubled, request

TOKEN = b"0123456789abcdef"


class Serving(SteppedServer):
    """A server of both transports, which the test runs step by step, or a thread."""

    def __init__(self, shape=SHAPE, slots=2, port=0, token=TOKEN):
        self.port, self.token = port, token
        super().__init__(shape, slots)

    def open_other(self, slots):
        listener = socket.create_server(("127.0.0.1", self.port))
        return TcpServer(listener, self.token, self.shared, slots)

    def has(self, client, pending):  # it is read, and not only one before it
        return super().has(client, pending) and self.other._posted

    def client(self, unsent=None):
        return TcpClient(self.other.address, TOKEN, "x", unsent)


def serving(*args, compute=None, **kwargs):
    return Serving(*args, **kwargs).running(compute)


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


@contextlib.contextmanager
def raw(one, hello=True):
    """A connection on which the test writes bytes; with a slot, if it says hello."""
    with socket.create_connection(one.other.address, DEADLINE_S) as sock:
        if hello:
            sock.sendall(frames.write_call(TOKEN))
            assert frames.read_answer(sock.recv(64, socket.MSG_WAITALL)) == (frames.Welcome.IN, SHAPE, 2)
        yield sock


def closed(sock):
    """What still comes before the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def written(sequence, value=1.0):
    return b"".join(frames.write_request(SHAPE, sequence, request(value)))


class TestTcp(LinkLaws):
    full = "all 2 slots for TCP are taken"


def test_a_request_that_its_client_withdrew_is_not_computed(idle):
    client = idle.client()
    client.post(request()).withdraw()
    pending = client.post(request(4))
    until(lambda: idle.other._connections and next(iter(idle.other._connections.values())).wanted == 2)
    assert idle.intake.step(doubled, 1) == 1
    assert (pending.wait(time.monotonic() + DEADLINE_S).sums == 8).all()
    client.close()


def test_a_client_that_means_another_server_is_told_so(idle):
    with pytest.raises(GoneError, match="another one has its port"):
        TcpClient(idle.other.address, secrets.token_bytes(16), "x")


def test_where_nobody_listens_there_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(EngineError, match=r"server x cannot be reached at 127\.0\.0\.1 port"):
        TcpClient(address, TOKEN, "x")


# --- large pieces ---------------------------------------------------------------------------------


@contextlib.contextmanager
def deaf(*servers):
    """Servers that read nothing meanwhile."""
    hears = Event()
    for one in servers:
        one.other._serve = lambda *args, serve=one.other._serve: (hears.wait(DEADLINE_S), serve(*args))
    try:
        yield
    finally:
        hears.set()


def test_requests_and_replies_larger_than_what_sockets_hold_arrive_whole():
    rng = np.random.default_rng(0)
    with serving(LARGE, compute=doubled) as one:
        client = one.client()
        sent = request(shape=LARGE, tokens=4096)
        sent.hidden[:] = rng.standard_normal(sent.hidden.shape, np.float32)
        with deaf(one):
            pending = client.post(sent)
            assert client._outbox, "it went at once; the test shows nothing"
        np.testing.assert_array_equal(pending.wait(time.monotonic() + DEADLINE_S).sums, 2 * sent.hidden)
        client.close()


def test_who_waits_for_one_server_sends_on_to_the_others():
    with serving(LARGE) as first, serving(LARGE) as second:
        unsent = set()
        clients = [one.client(unsent) for one in (first, second)]
        with deaf(first, second):
            pending = [client.post(request(shape=LARGE, tokens=4096)) for client in clients]
            assert unsent == set(clients)
        until(lambda: pending[0].look(time.monotonic() + 0.01) is None and not unsent)
        until(lambda: second.intake.waiting)
        for client in clients:
            client.close()


def test_a_large_request_that_was_withdrawn_half_sent_keeps_its_place_and_its_bytes():
    with serving(LARGE) as one:
        client = one.client()
        large = request(3, shape=LARGE, tokens=4096)
        with deaf(one):
            pending = client.post(large)
            assert client._outbox
            pending.withdraw()
            large.hidden[:] = np.nan  # the caller's memory is its own again
            rest, _ = client._outbox._pieces
            assert (np.frombuffer(rest[-4096:], np.float32) == 3).all()
            unsent = len(client._outbox)
            client.post(request(9, shape=LARGE)).withdraw()
            assert len(client._outbox) == unsent, "of the second, nothing was sent: there is nothing to withdraw"
        last = client.post(request(4, shape=LARGE))
        seen = []

        def compute(requests):
            seen.extend(float(one.hidden.max()) for one in requests)
            return doubled(requests)

        until(lambda: (last.look(0), one.intake.step(compute, 0.01))[0] is not None or 4.0 in seen)
        assert set(seen) <= {3.0, 4.0}
        client.close()


def test_a_client_that_does_not_read_its_reply_holds_up_nobody_and_is_not_read_until_it_does():
    with serving(LARGE, compute=doubled) as one:
        slow, quick = one.client(), one.client()
        pending = slow.post(request(shape=LARGE, tokens=4096))
        while slow._outbox:
            slow._send(())
        until(lambda: any(connection._outbox for connection in tuple(one.other._connections.values())))
        assert (quick.call(request(2, shape=LARGE), DEADLINE_S).sums == 4).all()
        assert (pending.wait(time.monotonic() + DEADLINE_S).sums == 2).all()
        slow.close()
        quick.close()


# --- peers that break the protocol ----------------------------------------------------------------


def line(place, value):
    """A request's line with a wrong number in it."""
    data = bytearray(written(1)[:64])
    data[place : place + 4] = value.to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("hello", "data"),
    [
        (False, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".ljust(64)),
        (False, bytes(64)),
        (True, b"\xff" * 64),
        (True, line(28, 2**32 - 1)),
        (True, line(32, 2**31)),
        (True, line(44, 9)),
        (True, written(0)),
        (True, written(5) + written(5)),
        (True, os.urandom(1 << 16)),
    ],
    ids=["http", "zeros", "ones", "tokens", "hidden", "kind", "number-0", "number-twice", "random"],
)
def test_who_breaks_the_protocol_is_cut_off_and_others_are_served(busy, hello, data, caplog):
    client = busy.client()
    with raw(busy, hello) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        closed(sock)
    until(lambda: len(busy.other._connections) == 1)
    assert "is cut off" in caplog.text
    assert (client.call(request(3), DEADLINE_S).sums == 6).all()
    client.close()


def test_a_peer_that_says_nothing_is_cut_off_and_takes_no_slot(monkeypatch, caplog):
    monkeypatch.setattr(server, "HELLO_S", 0.05)
    with serving(compute=doubled) as one, raw(one, hello=False) as sock:
        until(lambda: one.other._connections)
        assert one.other.clients == 0
        assert closed(sock) == b""
    assert "no hello" in caplog.text


def test_newcomers_beyond_a_number_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(server, "NEWCOMERS", 1)
    with serving() as one, raw(one, hello=False):
        until(lambda: one.other._connections)
        with raw(one, hello=False) as second:
            assert closed(second) == b""


def test_a_request_in_pieces_is_put_together(busy):
    with raw(busy) as sock:
        for byte in written(1, 3):
            sock.sendall(bytes([byte]))
        reply = sock.recv(64 + 32, socket.MSG_WAITALL)
    assert (np.frombuffer(reply[64:], np.float32) == 6).all()


def test_an_expert_that_the_model_does_not_have_is_refused_and_the_client_goes_on(busy, caplog):
    data = bytearray(written(1))
    data[64:68] = (77).to_bytes(4, "little")
    with raw(busy) as sock:
        sock.sendall(data)
        head = frames.read_reply_head(SHAPE, sock.recv(64, socket.MSG_WAITALL))
        assert (head.status, head.tokens) == (Status.MALFORMED, 0)
        sock.sendall(written(2, 4))
        assert (np.frombuffer(sock.recv(96, socket.MSG_WAITALL)[64:], np.float32) == 8).all()
    assert busy.intake.malformed == 1


def test_who_asks_again_before_the_reply_gets_only_the_last_one(idle):
    with raw(idle) as sock:
        for number in range(1, 50):
            sock.sendall(written(number, number))
        until(lambda: next(iter(idle.other._connections.values())).wanted == 49)
        assert len(idle.other._posted) == 1
        idle.step()
        data = sock.recv(96, socket.MSG_WAITALL)
        assert frames.read_reply_head(SHAPE, data[:64]).sequence == 49
        sock.shutdown(socket.SHUT_WR)
        assert closed(sock) == b""


@contextlib.contextmanager
def false_server(*pieces):
    """What says hello as a server does, then something else, whatever it is asked."""

    def serve():
        sock, _ = listener.accept()
        with sock:
            sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(pieces[0])
            for piece in pieces[1:]:
                sock.recv(64)
                sock.sendall(piece)
            sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            thread.join()


WELCOME = frames.write_answer(frames.Welcome.IN, SHAPE, 2)


def reply_line(sequence, **changes):
    values = {"epoch": 0, "status": 0, "tokens": 1, "hidden": 8, "dtype": 0} | changes
    return frames._REPLY.pack(sequence, *values.values())


@pytest.mark.parametrize(
    ("data", "message"),
    [(reply_line(1, tokens=2**32 - 1), "4294967295 tokens"), (reply_line(1, status=9), "unknown status 9"),
     (reply_line(2), "reply to request 2 of 1"), (b"\xff" * 64, "tokens of size"),
     (reply_line(1, dtype=7), "unknown dtype 7")],
)  # fmt: skip
def test_a_server_that_breaks_the_protocol_is_not_believed_and_its_connection_is_over(data, message):
    with false_server(WELCOME, data) as address:
        client = TcpClient(address, TOKEN, "x")
        with pytest.raises(WireError, match=message):
            client.call(request(), DEADLINE_S)
        with pytest.raises(WireError, match=message):
            client.call(request(), DEADLINE_S)


def test_what_is_no_expert_server_is_refused():
    with false_server(b"HTTP/1.1 400 Bad Request\r\n".ljust(64)) as address, pytest.raises(WireError, match="hello"):
        TcpClient(address, TOKEN, "x")


def test_a_thread_that_stops_by_itself_stops_the_server(idle, monkeypatch):
    monkeypatch.setattr(TcpServer, "_accept", lambda *_: 1 / 0)
    socket.create_connection(idle.other.address).close()
    with pytest.raises(EngineError, match="reads no more from TCP: ZeroDivisionError"):
        until(lambda: idle.intake.step(doubled, 1))


# --- processes ------------------------------------------------------------------------------------

OTHER = """
import sys, time
sys.path += {tests!r}
from test_tcp_transport import *
{script}
"""


@contextlib.contextmanager
def other_process(script):
    """Another process that runs a script, and its first line of output."""
    code = OTHER.format(tests=[str(folder) for folder in Path(__file__).parents[:2]], script=script)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


SERVE = "one = Serving(port={port}, token={token!r}); print(one.other.address[1], flush=True); one.run()"


def test_a_server_that_was_killed_is_found_out_and_one_at_its_port_is_not_taken_for_it():
    with other_process(SERVE.format(port=0, token=TOKEN)) as (process, port):
        address = "127.0.0.1", int(port)
        client = TcpClient(address, TOKEN, "x")
        assert (client.call(request(2), DEADLINE_S).sums == 4).all()
        process.send_signal(signal.SIGSTOP)
        pending = client.post(request())
        process.kill()
        with pytest.raises(EngineError, match="connection lost"):
            pending.wait(time.monotonic() + DEADLINE_S)
        with pytest.raises(EngineError, match="connection lost"):
            client.call(request(), DEADLINE_S)
    with other_process(SERVE.format(port=port, token=b"another server's")):
        with pytest.raises(GoneError, match="another one has its port"):
            TcpClient(address, TOKEN, "x")
        client = TcpClient(address, b"another server's", "x")
        assert (client.call(request(5), DEADLINE_S).sums == 10).all()
        client.close()


def test_a_server_that_was_suspended_replies_to_what_is_still_wanted_when_it_goes_on():
    with other_process(SERVE.format(port=0, token=TOKEN)) as (process, port):
        client = TcpClient(("127.0.0.1", int(port)), TOKEN, "x")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match="did not reply in time"):
            client.call(request(5), 0.05)
        pending = client.post(request(7))
        assert pending.look(time.monotonic() + 0.05) is None
        process.send_signal(signal.SIGCONT)
        assert (pending.wait(time.monotonic() + DEADLINE_S).sums == 14).all()
        client.close()


def test_the_slot_of_a_client_that_was_killed_is_free_at_once_and_its_request_not_computed(idle):
    script = f"client = TcpClient({idle.other.address!r}, TOKEN, 'x'); client.post(request()); print(flush=True)"
    with other_process(f"{script}; time.sleep(60)"):
        until(lambda: idle.intake.waiting)
    until(lambda: not idle.other.clients)
    assert idle.intake.step(doubled, 0) == 0
