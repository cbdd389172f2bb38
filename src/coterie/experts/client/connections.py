"""By what a server is reached: shared memory on its own host; from others NIXL, where both sides have it, or TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from coterie.errors import ConfigError, EngineError, GoneError, WireError
from coterie.experts.client.links import Link, Pending
from coterie.experts.client.nixl_tries import NixlTries
from coterie.experts.client.table import Server
from coterie.experts.members import SHORT
from coterie.experts.monitor.calls import ask
from coterie.experts.protocol import Reply, Request
from coterie.experts.protocol.frames import TOKEN_BYTES
from coterie.experts.transport import SharedClient, nixl
from coterie.experts.transport.nixl import NixlClient
from coterie.experts.transport.tcp import TcpClient
from coterie.http_server import is_any


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server takes requests by TCP; a host that stands for all of its addresses means that of its URL."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server's /config says of the ways to it."""

    id: str
    shared_memory: str
    tcp: Address | None
    nixl: bool = False


class Connector:
    """Makes connections for the links of one thread; see `links.Connect`.

    A server whose file is in this host's shared memory is on this host, since its name has 128 random bits.  Others are
    asked by HTTP how they are reached, and connected to, in a thread: who sends a request does not wait for that.  By
    NIXL, if the server was started with it and it is installed here, too; else, or where that fails, by TCP.

    Args:
        fingerprint: of the client's model; see `ExpertFiles.fingerprint`.  Servers of other experts are not asked.
    """

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._unsent_tcp: set[TcpClient] = set()
        self._nixl = NixlTries()

    def __call__(self, server: Server) -> Link:
        """A connection to a server; errors of one on another host come when its first reply is looked for.

        Raises:
            EngineError: the server is on this host and gone, has another model's experts, or all its slots are taken.
            WireError: its file is damaged.
        """
        if not server.url or _is_here(server):
            return self._of_this_model(SharedClient(Path(server.address)), server)
        return _LateLink(partial(self._from_afar, server))

    def _from_afar(self, server: Server) -> Link:
        try:
            offer = ask(server.url, "GET", "/config", Offer, who=f"expert server {server.name}")
            token = bytes.fromhex(offer.id)
        except (ConfigError, ValueError) as error:
            raise WireError(f"expert server {server.name}: {error}") from error
        if offer.shared_memory != server.address:
            raise GoneError(f"expert server {server.name} died; another one has its URL")
        if offer.nixl and nixl.is_installed():
            link = self._nixl.connect(server, offer.id, or_tcp=offer.tcp is not None)
            if link is not None:
                return self._of_this_model(link, server)
        if offer.tcp is None:
            raise EngineError(f"expert server {server.name} is on another host; {_remedy(offer)}")
        if len(token) != TOKEN_BYTES:
            raise WireError(f"expert server {server.name}: id {offer.id!r}; need {TOKEN_BYTES} bytes")
        host = offer.tcp.host
        if is_any(host):
            host = urlsplit(server.url).hostname or host
        return self._of_this_model(TcpClient((host, offer.tcp.port), token, server.name, self._unsent_tcp), server)

    def _of_this_model(self, link: SharedClient | TcpClient | NixlClient, server: Server) -> Link:
        theirs = link.shape.fingerprint.hex()
        if theirs == self._fingerprint:
            return link
        link.close()
        raise EngineError(
            f"expert server {server.name} has experts with the fingerprint {theirs[:SHORT]}, this client's model has "
            f"{self._fingerprint[:SHORT]}: start the server with the client's checkpoint, or the client with its"
        )


class _LateLink:
    """A connection that a thread makes; requests are sent when it is there."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        self._made: Future[Link] = Future()
        threading.Thread(target=self._make, args=(connect,), name="expert-connect", daemon=True).start()

    def post(self, request: Request) -> Pending:
        """See `Link`."""
        if self._made.done() and self._made.exception() is None:
            return self._made.result().post(request)
        return _LatePending(self._made, request)

    def close(self) -> None:
        """See `Link`; a connection that is not made yet is closed as soon as it is."""
        self._made.add_done_callback(_close)

    def _make(self, connect: Callable[[], Link]) -> None:
        try:
            self._made.set_result(connect())
        except (EngineError, WireError) as error:
            self._made.set_exception(error)
        except BaseException as error:  # whatever a server has caused must not end who looks for its reply
            problem = EngineError(f"connecting failed: {error!r}")
            problem.__cause__ = error
            self._made.set_exception(problem)


class _LatePending:
    def __init__(self, made: Future[Link], request: Request) -> None:
        self._made, self._request = made, request
        self._pending: Pending | None = None

    def look(self, until_s: float) -> Reply | None:
        """See `Pending`."""
        if self._pending is None:
            try:
                link = self._made.result(max(0.0, until_s - time.monotonic()))
            except TimeoutError:
                return None
            self._pending = link.post(self._request)
        return self._pending.look(until_s)

    def withdraw(self) -> None:
        """See `Pending`."""
        if self._pending is not None:
            self._pending.withdraw()


def _remedy(offer: Offer) -> str:
    if offer.nixl:
        return "it takes requests by NIXL: pip install 'coterie[nixl]' here, or start it with --tcp-port, too"
    return "start it with --tcp-port, or --nixl"


def _is_here(server: Server) -> bool:
    return Path(server.address).exists()


def _close(made: Future[Link]) -> None:
    if made.exception() is None:
        made.result().close()
