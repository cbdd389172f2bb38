#!/usr/bin/env python3
"""Round trips to an expert server that computes nothing, with all copies: shared memory, TCP, NIXL, ZeroMQ and gRPC.

    python3 bench/expert_transport.py [--json]

Needs pyzmq, for the comparison; gRPC's rows come where grpcio is installed, and NIXL's where nixl is, over what UCX has
on one host: `make vllm-env` has both.  The servers of ZeroMQ and gRPC do no more than copy: they check nothing, and
merge nothing.  One token of the size that is named goes there, and as much comes back; ids and router weights go, too.
"doorbell" is two processes that ring for one another, without any payload: what waking costs here.
CPU is that of a call, at either side; idle CPU is the server's while nobody calls, with NIXL while a client has a slot.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import numpy as np
import zmq
from processes import cpu_s
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from coterie.experts.protocol import Dtype, Reply, Request, SlotShape, Status
from coterie.experts.server.nixl_slots import slot_for
from coterie.experts.transport import Intake, SharedClient, SharedServer, nixl
from coterie.experts.transport.doorbell import Doorbell
from coterie.experts.transport.nixl import Agent, NixlClient, NixlServer, handshake
from coterie.experts.transport.tcp import TcpClient, TcpServer
from coterie.experts.transport.words import Words
from coterie.http_server import listen, serving_app, url_of

NETWORKS = {"shared memory": "posix,sysv,cma,self,tcp", "TCP": "tcp"}  # that UCX may use
SIZES = {"4 KiB": 1024, "64 KiB": 16384}  # float32 of one token
CALLS, WARM_UP = 4000, 200
IDLE_S = 3.0


def shape_of(hidden: int) -> SlotShape:
    return SlotShape(tokens=64, hidden=hidden, top_k=8, layers=1, experts=64)


def request(hidden: int) -> Request:
    ids, weights = np.zeros((1, 8), np.int32), np.ones((1, 8), np.float32)
    return Request(0, 0, 0, np.ones((1, hidden), np.float32), ids, weights, Dtype.FLOAT32)


def echo(requests):
    return [Reply(0, Status.COMPUTED, one.hidden) for one in requests]


def serve_shared(ready: Connection, hidden: int) -> None:
    server = SharedServer(shape_of(hidden), slots=2)
    ready.send(server.path)
    intake = Intake(server)
    while True:
        intake.step(echo, timeout_s=1)


def serve_tcp(ready: Connection, hidden: int) -> None:
    shared = SharedServer(shape_of(hidden), slots=2)
    token = secrets.token_bytes(16)
    tcp = TcpServer(socket.create_server(("127.0.0.1", 0)), token, shared, slots=2)
    intake = Intake(shared, tcp)
    ready.send((tcp.address, token))
    while True:
        intake.step(echo, timeout_s=1)


def serve_nixl(ready: Connection, hidden: int) -> None:
    shared, server = SharedServer(shape_of(hidden), slots=2), secrets.token_hex(16)
    inlet, over = NixlServer(Agent(server), shared, slots=2), asyncio.Event()

    async def slot(request: HttpRequest) -> Response:
        return slot_for(inlet, server, request.query_params.get("server"), over)

    async def answer() -> None:
        with listen("127.0.0.1", 0, "port") as listener:
            async with serving_app(Starlette(routes=[Route(handshake.PATH, slot)]), listener, grace_s=0):
                ready.send((url_of(listener), server))
                await over.wait()

    threading.Thread(target=asyncio.run, args=(answer(),), daemon=True).start()
    intake = Intake(shared, inlet)
    while True:
        intake.step(echo, timeout_s=1)


def serve_grpc(ready: Connection) -> None:
    import grpc

    def reply(message: bytes, _: object) -> bytes:
        return np.frombuffer(message, np.float32, (len(message) - 64) // 4, 64).tobytes()

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_registered_method_handlers("bench", {"echo": grpc.unary_unary_rpc_method_handler(reply)})
    ready.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def serve_zmq(ready: Connection, address: str) -> None:
    server = zmq.Context().socket(zmq.REP)
    server.bind(address)
    ready.send(server.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        hidden, _, _ = server.recv_multipart()
        server.send(np.frombuffer(hidden, np.float32).copy())


def serve_doorbell(ready: Connection, file: int) -> None:
    words = Words(mmap.mmap(file, 4096))
    here, there = Doorbell(words, 0), Doorbell(words, 64)
    ready.send(None)
    answered = 0

    def rung() -> bool | None:
        return words.load32(0) > answered or None

    while True:
        if here.wait(rung, 1):
            answered += 1
            there.ring()


@contextmanager
def serving(
    target: Callable[..., None], *arguments: object, start: str = "fork"
) -> Iterator[tuple[object, multiprocessing.Process]]:
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(start).Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield mine.recv(), process
    finally:
        process.kill()
        process.join()


def time_calls(call: Callable[[], object], process: int) -> dict[str, float]:
    for _ in range(WARM_UP):
        call()
    times, used_s = [], (time.process_time(), cpu_s(process))
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    here, there = time.process_time() - used_s[0], cpu_s(process) - used_s[1]
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    cpu = {"client CPU us": here * 1e6 / CALLS, "server CPU us": there * 1e6 / CALLS}
    return {what: round(value, 1) for what, value in {"p50 us": p50, "p99 us": p99, **cpu}.items()}


def idle_percent(process: int) -> float:
    before = cpu_s(process)
    time.sleep(IDLE_S)
    return round(100 * (cpu_s(process) - before) / IDLE_S, 1)


def measure_shared(hidden: int) -> dict[str, float]:
    with serving(serve_shared, hidden) as (path, process):
        client, sent = SharedClient(path), request(hidden)
        result = time_calls(lambda: client.call(sent, timeout_s=1), process.pid)
        client.close()
        return result | {"idle server CPU %": idle_percent(process.pid)}


def measure_tcp(hidden: int) -> dict[str, float]:
    with serving(serve_tcp, hidden) as ((address, token), process):
        client, sent = TcpClient(address, token, "bench"), request(hidden)
        result = time_calls(lambda: client.call(sent, timeout_s=1), process.pid)
        client.close()
        return result | {"idle server CPU %": idle_percent(process.pid)}


def measure_nixl(hidden: int, networks: str) -> dict[str, float]:
    os.environ["UCX_TLS"] = networks
    with serving(serve_nixl, hidden, start="spawn") as ((url, server), process):
        client, sent = NixlClient(url, server, "bench"), request(hidden)
        result = time_calls(lambda: client.call(sent, timeout_s=1), process.pid)
        result["idle server CPU %"] = idle_percent(process.pid)
        client.close()
        return result


def measure_grpc(hidden: int) -> dict[str, float]:
    import grpc

    with serving(serve_grpc, start="spawn") as (port, process), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask, sent = channel.unary_unary("/bench/echo"), request(hidden)

        def call() -> np.ndarray:
            message = b"".join((sent.ids, sent.weights, sent.hidden))
            return np.frombuffer(ask(message, wait_for_ready=True), np.float32).copy()

        return time_calls(call, process.pid) | {"idle server CPU %": idle_percent(process.pid)}


def measure_zmq(hidden: int, address: str) -> dict[str, float]:
    with serving(serve_zmq, address) as (bound, process):
        client, sent = zmq.Context().socket(zmq.REQ), request(hidden)
        client.connect(bound)

        def call() -> np.ndarray:
            client.send_multipart([sent.hidden, sent.ids, sent.weights])
            return np.frombuffer(client.recv(), np.float32).copy()

        return time_calls(call, process.pid) | {"idle server CPU %": idle_percent(process.pid)}


def measure_doorbell() -> dict[str, float]:
    file = os.memfd_create("doorbells")
    os.ftruncate(file, 4096)
    with serving(serve_doorbell, file) as (_, process):
        words = Words(mmap.mmap(file, 4096))
        there, here = Doorbell(words, 0), Doorbell(words, 64)

        def call() -> None:
            seen = words.load32(64)
            there.ring()
            here.wait(lambda: words.load32(64) != seen or None, 1)

        return time_calls(call, process.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {"doorbell": measure_doorbell()}
    with tempfile.TemporaryDirectory() as folder:
        for name, hidden in SIZES.items():
            results[f"shared memory, {name}"] = measure_shared(hidden)
            results[f"TCP, {name}"] = measure_tcp(hidden)
            results[f"ZeroMQ ipc, {name}"] = measure_zmq(hidden, f"ipc://{folder}/{hidden}")
            results[f"ZeroMQ TCP, {name}"] = measure_zmq(hidden, "tcp://127.0.0.1:*")
    with suppress(ModuleNotFoundError):  # last: it must not be loaded in a process that forks
        for name, hidden in SIZES.items():
            results[f"gRPC, {name}"] = measure_grpc(hidden)
    if nixl.is_installed():
        for name, hidden in SIZES.items():
            for way, networks in NETWORKS.items():
                results[f"NIXL, {way}, {name}"] = measure_nixl(hidden, networks)
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for name, values in results.items():
        print(f"{name:30}", "  ".join(f"{what} {value:8}" for what, value in values.items()))


if __name__ == "__main__":
    main()
