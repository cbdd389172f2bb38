"""Tells other gateways what this one holds, again and again, and lets what they say count."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coterie.decoding import UNREADABLE
from coterie.errors import CoterieError, EngineError
from coterie.gateway.admin.api import Error
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import peer_headers
from coterie.gateway.legs.pool import Pool
from coterie.gateway.legs.upstream import Collected, Patience
from coterie.gateway.metrics import Labelled
from coterie.gateway.peers.heard import Heard, Own, View
from coterie.gateway.peers.message import MEDIA, Message, Taken, message_of, write_message
from coterie.gateway.peers.pace import PARTS, Pace
from coterie.routing.shared_load import Board

PATH = "/peers"
LAST_S = 1.0
"""How long the last message of a gateway that ends may take."""

_MAX_REPLY_BYTES = 64 << 10
_log = logging.getLogger("coterie.gateway")


@dataclass(slots=True, eq=False)
class Link:
    """The way to one peer.

    Attributes:
        name: what metrics call it, by its place in the configuration.
        url: of its admin side.
        pool: connections to it.
        pace: when it is told again.
        identity: its gateway's, once it answered; this gateway's own if the URL leads here.
        problem: why it did not take the last message; None if it did.
        told_s: when it last took one; None before.
    """

    name: str
    url: str
    pool: Pool
    pace: Pace
    identity: str | None = None
    problem: str | None = "not yet told"
    told_s: float | None = None


class Exchange(Collector):
    """This gateway's part of the exchange with its peers.

    It is run by the one process of a gateway that has the admin side; the others find what was heard on the board.

    Args:
        config: names the peers.
        board: what this gateway's processes hold, and rows for what its peers do.
        headers: header lines that every message gets, such as the key of the admin side.

    Attributes:
        identity: of this gateway, from start to end: one that starts again is another one.
        links: to the peers.
        heard: what counts of what they said.
    """

    def __init__(self, config: GatewayConfig, board: Board, headers: bytes) -> None:
        self.identity = secrets.token_hex(16)
        self._own = Own(board, config.processes)
        rows = range(config.processes, config.board_rows)
        self.heard = Heard(self._own, self.identity, board, rows, config.peer_timeout_s)
        self.links = [_link(i, url, config, headers) for i, url in enumerate(config.peer)]
        self._patience = Patience(config.peer_timeout_s, config.peer_timeout_s)
        self._look_s = config.exchange_s / PARTS
        self._sequence = 0
        self._messages = Labelled("coterie_peer_messages", "Messages to peers.", ("peer", "outcome"))
        self._said = Labelled("coterie_peer_messages_heard", "Messages of peers.", ("outcome",))
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take part until the block is left; then say so to the peers."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._take_leave()
            for identity in list(self.heard.views):
                self.heard.forget(identity)

    def hear(self, message: Message) -> Taken:
        """A peer says what it holds.

        Raises:
            CoterieError: it cannot count; see `Heard.take`.
        """
        try:
            counts = self.heard.take(message, self.now())
        except CoterieError:
            self._said.inc("refused")
            raise
        self._said.inc("counts" if counts else "late")
        return Taken(self.identity, counts)

    def now(self) -> float:
        """On the clock by which views age."""
        return asyncio.get_running_loop().time()

    def names(self) -> Mapping[str, str]:
        """Names of peers by their identities, as far as those are known."""
        return {link.identity: link.name for link in self.links if link.identity is not None}

    # --- telling -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                self._look(self.now())
            except Exception:
                _log.exception("the exchange with peers failed; it is tried again")
            await asyncio.sleep(self._look_s)

    def _look(self, now_s: float) -> None:
        for view in self.heard.expire(now_s):
            name = self.names().get(view.identity, view.identity)
            _log.warning("peer %s is silent: its %d requests no longer count", name, view.requests)
        for link in self.links:
            link.pool.expire(now_s)
        self._tell(now_s, self._own.mark())

    def _tell(self, now_s: float, mark: bytes) -> None:
        due = [link for link in self._others() if link.pace.due(now_s, mark)]
        if due:
            body = self._message()
            for link in due:
                link.pace.began(now_s, mark)
                self._begin(link, body)

    def _others(self) -> list[Link]:
        """All links that do not lead here: one configuration may serve all gateways."""
        return [link for link in self.links if link.identity != self.identity]

    def _begin(self, link: Link, body: bytes) -> None:
        task = asyncio.create_task(self._post(link, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _message(self, *, leaving: bool = False) -> bytes:
        self._sequence += 1
        return write_message(message_of(self._own.figures(), self.identity, self._sequence, leaving=leaving))

    async def _post(self, link: Link, body: bytes) -> None:
        reply, taken = Collected(_MAX_REPLY_BYTES), False
        try:
            await link.pool.post(PATH.encode(), b"", body, reply, self._patience, MEDIA.encode())
            link.identity = _identity(reply)
            taken = True
        except EngineError as error:
            self._failed(link, str(error), "refused" if reply.complete else "failed")
        else:
            self._taken(link)
        finally:
            link.pace.ended(taken=taken)

    def _taken(self, link: Link) -> None:
        self._messages.inc(link.name, "taken")
        link.told_s = self.now()
        if link.problem is not None:
            _log.info("peer %s (%s) is told what this gateway holds", link.name, link.url)
        link.problem = None

    def _failed(self, link: Link, problem: str, outcome: str) -> None:
        self._messages.inc(link.name, outcome)
        if link.problem != problem:
            _log.warning("peer %s (%s) is not told what this gateway holds: %s", link.name, link.url, problem)
        link.problem = problem

    async def _take_leave(self) -> None:
        """Tell the peers that this gateway ends, as far as they listen now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        body = self._message(leaving=True)
        for link in self._others():
            self._begin(link, body)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=LAST_S)
            for task in late:
                task.cancel()
        for link in self.links:
            link.pool.close()

    # --- metrics -------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        yield from self._messages.collect()
        yield from self._said.collect()
        names, now_s = self.names(), self.now()
        views = [(names[view.identity], view) for view in self.heard.views.values() if view.identity in names]
        yield _gauge("heard_seconds", "Since the last message of a peer.", views, lambda view: now_s - view.heard_s)
        yield _gauge("in_flight_requests", "Requests that a peer holds.", views, lambda view: view.requests)
        yield _gauge(
            "unknown_workers", "Workers of a peer that are none here.", views, lambda view: view.unknown_workers
        )


@contextlib.asynccontextmanager
async def exchanging(config: GatewayConfig, board: Board, environ: Mapping[str, str]) -> AsyncIterator[Exchange | None]:
    """Take part in the exchange until the block is left, if the configuration names peers.

    Raises:
        ConfigError: the key of the admin side is not in the environment.
    """
    if not config.peer:
        yield None
        return
    exchange = Exchange(config, board, peer_headers(config, environ))
    async with exchange.running():
        yield exchange


def _gauge(name: str, text: str, views: Iterable[tuple[str, View]], value: Callable[[View], float]) -> Metric:
    family = GaugeMetricFamily(f"coterie_peer_{name}", text, labels=["peer"])
    for peer, view in views:
        family.add_metric([peer], value(view))
    return family


def _link(number: int, url: str, config: GatewayConfig, headers: bytes) -> Link:
    pool = Pool(
        f"peer-{number}",
        url,
        headers,
        config.worker_ca,
        connect_timeout_s=config.connect_timeout_s,
        keep_idle_s=config.keep_idle_s,
    )
    return Link(f"peer-{number}", url, pool, Pace(config.exchange_s))


def _identity(reply: Collected) -> str:
    """Of the gateway that has taken a message.

    Raises:
        EngineError: it has not.
    """
    body = reply.body()
    try:
        if reply.status == 200:
            return msgspec.json.decode(body, type=Taken).identity
        message = msgspec.json.decode(body, type=Error).error.message
    except UNREADABLE:
        message = "this is no reply of a gateway's admin side"
    raise EngineError(f"it answered {reply.status}: {message}")
