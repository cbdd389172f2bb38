"""Clients that leave, stall, close their half or send too much: nobody else notices, and nothing is left behind."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_cluster import LEASE_S, PROMPTS
from fault_proxy import Moment, Trap

from waiting import wait_until

WINDOWS = [
    ("prefill", Moment.BEFORE, "prefill"),
    ("prefill", Moment.WAITING, "prefill"),
    ("prefill", Moment.MIDST, "prefill"),
    ("decode", Moment.BEFORE, "decode"),
    ("decode", Moment.WAITING, "decode"),
    ("decode", Moment.MIDST, "stream"),
]
"""Which leg a request is in when its client leaves, where in it, and what the gateway calls that."""


class Client:
    """A client that reads only when it is told to."""

    def __init__(self, cluster, *, tokens=400, window_bytes=None, **more):
        host, port = cluster.gateway.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if window_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        self.socket.settimeout(20)
        self.socket.connect((host, int(port)))
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.post(json.dumps({**body, "stream": True, **more}).encode())

    def post(self, body, head=b""):
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (head, len(body))
        self.socket.sendall(head + body)

    def read_all(self):
        """What comes until the last event, or the connection's end."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while not data.endswith(b"0\r\n\r\n") and (part := self.socket.recv(1 << 16)):
                data += part
        return data

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def hold(until):
    """Keep a request where it is until an event is set, then let it go on."""

    async def act(_):
        await asyncio.to_thread(until.wait, 20)

    return act


def left_in(cluster, window):
    return cluster.metric("coterie_client_disconnects_total", window=window)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("role", "moment", "window"), WINDOWS)
def test_a_client_leaves(cluster, role, moment, window, stream):
    if window == "stream" and not stream:
        pytest.skip("a reply in one piece has no midst that its client sees")
    gone, before = threading.Event(), left_in(cluster, window)
    with cluster.lying_in_wait(role, trap := Trap(moment, hold(gone))):
        with Client(cluster, stream=stream) as client:
            trap.caught.result(10)
            if window == "stream":
                client.socket.recv(1)  # before that, the gateway rightly holds that no stream has begun
        try:
            wait_until(lambda: left_in(cluster, window) > before, what=f"a disconnect in the window {window}")
        finally:
            gone.set()
    # KV that nobody will decode is released at once, not by its lease; what runs is stopped.
    wait_until(cluster.nothing_held, within_s=LEASE_S / 2, what="the end of all load")


def test_a_slow_client_gets_everything(cluster, matrix):
    whole, data = cluster.ask(PROMPTS[0], 400).text, b""
    with Client(cluster, window_bytes=2048) as client, ThreadPoolExecutor(1) as other:
        undisturbed = other.submit(cluster.ask, PROMPTS[1])
        while not data.endswith(b"0\r\n\r\n"):
            data += client.socket.recv(2048)
            time.sleep(0.001)
        assert undisturbed.result().text == matrix.texts[PROMPTS[1]]
    assert text_of(data) == whole
    wait_until(cluster.nothing_held, what="the end of all load")


async def flood(tunnel):
    """Send events faster than any engine, without an end."""
    await tunnel.answer(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    event = b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "text": "x" * 60_000}]}).encode()
    while True:
        await tunnel.answer(b"%x\r\n%b\r\n" % (len(event), event))


def test_a_client_that_takes_nothing_more_is_cut_and_its_request_stopped(cluster, matrix):
    with (
        cluster.lying_in_wait("decode", trap := Trap(Moment.WAITING, flood)),
        Client(cluster, window_bytes=2048) as client,
    ):
        trap.caught.result(10)
        assert cluster.ask(PROMPTS[1]).text == matrix.texts[PROMPTS[1]]
        wait_until(cluster.nothing_held, within_s=10, what="the end of all load")
        assert not client.read_all().endswith(b"0\r\n\r\n")


def test_a_client_that_closes_its_half_counts_as_gone(cluster):
    before = cluster.metric("coterie_client_disconnects_total")
    with Client(cluster) as client:
        client.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: cluster.metric("coterie_client_disconnects_total") > before, what="a disconnect")
        wait_until(cluster.nothing_held, within_s=LEASE_S / 2, what="the end of all load")


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [(b"", b"[" * (1 << 20) + b"]", b"413"), (b"x: %b\r\n" % (b"y" * 70_000), b"{}", b"431")],
    ids=["body", "head"],
)
def test_a_request_that_is_too_large_reaches_no_worker(cluster, head, body, status):
    steps = sum(engine.metric("coterie:engine_steps_total") for engine in cluster.all_engines)
    with Client(cluster, tokens=1) as client:
        client.read_all()
        client.post(body, head)
        assert client.socket.recv(1 << 16).split()[1] == status
    assert cluster.nothing_held()
    assert sum(engine.metric("coterie:engine_steps_total") for engine in cluster.all_engines) <= steps + 2


def text_of(data):
    """Of a chunked stream of completions, its events whole or cut by chunks."""
    chunks = []
    _, _, rest = data.partition(b"\r\n\r\n")
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    events = [event.removeprefix(b"data: ") for event in b"".join(chunks).split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
