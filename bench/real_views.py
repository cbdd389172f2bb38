"""How far real gateways' views of each other are off, beside what the simulator says; see `views.py --real`.

Gateways that are peers serve from one event loop, over real sockets, in front of the mock workers of `gateway.py`, so
that all views and the truth are read at one moment.  Each request comes to one of them by chance.  The same requests at
the same workers, as long as they were there, are then given to the simulator's exchange, with the delay that a change
has on average: gateways look at what has changed four times in `exchange_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from processes import free_ports, started

from coterie.core import ModelGeometry, RouteRequest, WorkerState
from coterie.engines.vllm_nixl import VllmNixl
from coterie.gateway.config import GatewayConfig
from coterie.gateway.gateway import Gateway
from coterie.gateway.peers.heard import DECODE, Heard, Own
from coterie.gateway.peers.message import message_of, read_message, write_message
from coterie.gateway.peers.pace import PARTS
from coterie.gateway.server import serving
from coterie.routing import Ledger
from coterie.routing.shared_batches import SharedBatches
from coterie.routing.shared_load import Board
from coterie.sim.exchange import Exchange
from coterie.sim.kernel import Kernel, Priority
from gateway import build

WORKERS = 8
TOKENS = 20
TOKEN_S = 0.1
LOOK_S = 0.02
"""From one look at the views to the next."""
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"max_tokens":%d,"stream":true}' % TOKENS


@dataclass(frozen=True)
class Asked:
    """A request: when it was sent to a decode worker, by which gateway, to which, and how long it was there."""

    at_s: float
    gateway: int
    worker: str
    took_s: float


@dataclass(frozen=True)
class Off:
    """By how many requests views of a worker are off, over gateways and workers: mean and P99 over looks."""

    mean: float
    p99: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Off:
        """Of so much at each look."""
        return cls(statistics.mean(errors), float(np.percentile(errors, 99)))

    def __str__(self) -> str:
        return f"{self.mean:.2f} / {self.p99:.2f}"


@dataclass(frozen=True)
class Real:
    """Of one run; a worker holds `held` requests."""

    gateways: int
    exchange_s: float
    held: float
    measured: Off
    simulated: Off
    alone: Off


def error(ledgers: Sequence[Ledger]) -> float:
    seen = np.array([[state.requests for state in ledger.states()] for ledger in ledgers])
    held = np.array([[load.requests for load in ledger.own().values()] for ledger in ledgers])
    return float(np.abs(seen - held.sum(axis=0)).mean())


# --- for real ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workers(folder: Path) -> Iterator[list[str]]:
    """URLs of a prefill worker and the decode workers."""
    ports = free_ports(1 + WORKERS)
    with contextlib.ExitStack() as stack:
        for i, port in enumerate(ports):
            role = ["-m", "decode", "-d", str(int(TOKEN_S * 1e6))] if i else ["-m", "prefill"]
            reply = [] if i else ["-r", str(folder / "reply.json")]
            stack.enter_context(
                started([str(folder / "mock"), "-p", str(port), *role, *reply], port, folder / "mock.log")
            )
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextlib.asynccontextmanager
async def peers(urls: Sequence[str], count: int, exchange_s: float) -> AsyncIterator[list[Gateway]]:
    ports = free_ports(2 * count)
    names = tuple(f"http://127.0.0.1:{port}" for port in ports[:count])
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for admin_port, port in zip(ports[:count], ports[count:], strict=True):
            config = GatewayConfig(
                prefill=(urls[0],),
                decode=tuple(urls[1:]),
                peer=names,
                exchange_s=exchange_s,
                peer_timeout_s=max(5.0, 3 * exchange_s),
                port=port,
                admin_port=admin_port,
                log_requests=False,
                keep_decisions=1_000_000,
                continue_streams=False,
                shutdown_grace_s=0.1,
            )
            gateways.append((await stack.enter_async_context(serving(config, VllmNixl()))).gateway)
        yield gateways


async def ask(port: int) -> str:
    """Ask a gateway; return the request's id once its reply is complete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    writer.write(head + BODY)
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    return head.lower().partition(b"x-request-id: ")[2].split(b"\r\n")[0].decode()


def asked_of(gateways: Sequence[Gateway], ends_s: dict[str, float]) -> list[Asked]:
    """What gateways decided, with when it ended; in the order of time, from the first."""
    decided = [(i, entry) for i, one in enumerate(gateways) for entry in one.dispatcher.decisions.entries()]
    start_s = min(entry["time"] for _, entry in decided)
    asked = [
        Asked(entry["time"] - start_s, i, entry["decode"], ends_s[entry["id"]] - entry["time"]) for i, entry in decided
    ]
    return sorted(asked, key=lambda one: one.at_s)


async def serve(
    urls: Sequence[str], count: int, exchange_s: float, rate: float, for_s: float
) -> tuple[list[Asked], list[float], float]:
    """Requests that came, what views were off by, and what a worker held on average."""
    rng, ends_s, tasks = np.random.default_rng(0), {}, set()
    async with peers(urls, count, exchange_s) as gateways:
        ledgers = [gateway.decode.ledger for gateway in gateways]
        start_s = time.monotonic()

        async def one(gateway: int) -> None:
            id_ = await ask(gateways[gateway].config.port)
            ends_s[id_] = time.time()

        async def arrive() -> None:
            while time.monotonic() < start_s + for_s:
                tasks.add(asyncio.create_task(one(int(rng.integers(count)))))
                await asyncio.sleep(rng.exponential(1 / rate))

        arriving = asyncio.create_task(arrive())
        errors, held = [], []
        while not arriving.done():
            await asyncio.sleep(LOOK_S)
            if time.monotonic() > start_s + TOKENS * TOKEN_S:
                errors.append(error(ledgers))
                held.append(sum(load.requests for ledger in ledgers for load in ledger.own().values()) / WORKERS)
        await asyncio.gather(*tasks)
        return asked_of(gateways, ends_s), errors, statistics.mean(held)


# --- by the simulator ----------------------------------------------------------------------------------


def simulated(asked: Sequence[Asked], count: int, delay_s: float | None) -> Off:
    """What views of the same requests are off by, each change being known after a delay; None for never."""
    kernel = Kernel()
    exchange = None if delay_s is None else Exchange(kernel, count, delay_s)
    targets = [WorkerState(name, name) for name in sorted({one.worker for one in asked})]
    ledgers = [Ledger(targets, kernel, others=exchange and exchange.loads[i]) for i in range(count)]
    errors: list[float] = []

    def arrive(one: Asked) -> None:
        lease = ledgers[one.gateway].lease(one.worker, RouteRequest("r", 1, TOKENS))
        kernel.after(one.took_s, Priority.END, lease.release)

    def look() -> None:
        if TOKENS * TOKEN_S < kernel.now() < max(one.at_s for one in asked):
            errors.append(error(ledgers))

    for one in asked:
        kernel.at(one.at_s, Priority.ARRIVAL, arrive, one)
    kernel.every(LOOK_S, look)
    kernel.run()
    return Off.of(errors)


# --- what a message costs ------------------------------------------------------------------------------


def cost(count: int, geometry: ModelGeometry) -> str:
    """Size of a message for so many decode workers, and what it costs to make and to take in, in ms (least of 9)."""
    names = [f"http://w{i}:8000" for i in range(count)]
    board, rng = Board(bytearray(Board.size(3)), 3), np.random.default_rng(0)
    ledger = Ledger([WorkerState(name, name) for name in names], others=board.row(DECODE, 0))
    own = Own(board, 1)
    with contextlib.closing(SharedBatches(board.announcements, 0, names, geometry)) as batches:
        for i, name in enumerate(names):
            ledger.lease(name, RouteRequest("r", 512, 512))
            batches.show(i, rng.integers(-(1 << 20), 0, geometry.layers * geometry.experts).astype(np.int32), +1)
        message = message_of(own.figures(), "1" * 32, 1)
        body, numbers = write_message(message), itertools.count(1)
        made_ms = _least_ms(lambda: write_message(message_of(own.figures(), "1" * 32, 1)))
        heard = Heard(own, "0" * 32, board, [1, 2], 5.0)

        def take() -> None:
            heard.take(msgspec.structs.replace(read_message(body), sequence=next(numbers)), 0.0)

        taken_ms = _least_ms(take)
        heard.forget("1" * 32)
    experts = f"{geometry.layers} x {geometry.experts}"
    return f"{count:>8} {experts:>11} {len(body) / 1e6:>8.2f} {made_ms:>8.2f} {taken_ms:>8.2f}"


def _least_ms(action: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return 1000 * min(times)


# -------------------------------------------------------------------------------------------------------


def measure(gateways: Sequence[int], exchanges_s: Sequence[float], rate: float, for_s: float) -> list[Real]:
    logging.getLogger("coterie.gateway").setLevel(logging.ERROR)
    runs = []
    with tempfile.TemporaryDirectory() as name:
        build(Path(name))
        with workers(Path(name)) as urls:
            for count in gateways:
                for exchange_s in exchanges_s:
                    asked, errors, held = asyncio.run(serve(urls, count, exchange_s, rate, for_s))
                    late = simulated(asked, count, exchange_s / PARTS / 2)
                    alone = simulated(asked, count, None)
                    runs.append(Real(count, exchange_s, held, Off.of(errors), late, alone))
    return runs


def as_table(runs: Sequence[Real]) -> str:
    lines = [f"{'gateways':>8}{'exchange_s':>11}{'held':>7}{'off, mean / P99':>17}{'simulated':>15}{'no exchange':>15}"]
    lines += [
        f"{run.gateways:>8}{run.exchange_s:>11g}{run.held:>7.1f}{run.measured!s:>17}{run.simulated!s:>15}{run.alone!s:>15}"
        for run in runs
    ]
    lines += ["", f"{'workers':>8} {'experts':>11} {'MB':>8} {'made ms':>8} {'taken ms':>8}"]
    lines += [cost(16, ModelGeometry(48, 128, 8)), cost(64, ModelGeometry(58, 256, 8))]
    return "\n".join(lines)
