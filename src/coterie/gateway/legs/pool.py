"""The keep-alive connections to one worker."""

from __future__ import annotations

import asyncio
import math
import ssl

from coterie.engines.base import Body
from coterie.gateway.edge.tls import worker_context
from coterie.gateway.legs.upstream import Consumer, Patience, Upstream, UpstreamError
from coterie.gateway.urls import split_url
from coterie.http_server import authority


class Pool:
    """Sends requests to one worker over kept connections, opening as many as there are requests in flight.

    Args:
        title: see below.
        url: where the worker is.
        headers: header lines that every request gets, such as the worker's API key.
        authorities: who vouches for an https worker, see `tls.worker_context`.
        connect_timeout_s: how long it may take to accept a connection.
        keep_idle_s: how long idle connections are kept.

    Attributes:
        title: the worker's role and name, for messages; never its URL.
        connections: all open connections, idle or not.
        heard_s: when the worker last sent anything, on the loop's clock.
        connect_timeout_s: how long the worker may take to accept a connection.
        keep_idle_s: how long idle connections are kept.
    """

    def __init__(
        self,
        title: str,
        url: str,
        headers: bytes = b"",
        authorities: str | None = None,
        *,
        connect_timeout_s: float,
        keep_idle_s: float,
    ) -> None:
        self.title = title
        self.connections: set[Upstream] = set()
        self.heard_s = -math.inf
        self._host, self._port, self._prefix, tls = split_url(url)
        self._tls = worker_context(authorities) if tls else None
        self._own_headers = f"host: {authority(self._host, self._port)}\r\n".encode() + headers
        self.connect_timeout_s = connect_timeout_s
        self.keep_idle_s = keep_idle_s
        self._idle: list[Upstream] = []
        self._opening = 0

    @property
    def busy(self) -> bool:
        """Whether a request is on its way, or a connection for one."""
        return self._opening > 0 or len(self.connections) > len(self._idle)

    async def post(
        self,
        target: bytes,
        headers: bytes,
        body: Body,
        consumer: Consumer,
        patience: Patience,
        media: bytes = b"application/json",
    ) -> None:
        """Post `body` and return when the reply is complete.

        Args:
            target: path and query.
            headers: complete header lines to send along.
            body: the body.
            consumer: takes the reply.
            patience: how long to wait for it.
            media: type of the body.

        Raises:
            UpstreamError: the reply did not arrive whole.
        """
        head = b"POST %b%b HTTP/1.1\r\n%b%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        head = head % (self._prefix, target, self._own_headers, headers, media, len(body))
        await self._send(head, body, consumer, patience)

    async def get(self, target: bytes, headers: bytes, consumer: Consumer, patience: Patience) -> None:
        """Get `target`; as `post`."""
        head = b"GET %b%b HTTP/1.1\r\n%b%b\r\n" % (self._prefix, target, self._own_headers, headers)
        await self._send(head, b"", consumer, patience)

    def keep(self, connection: Upstream, now_s: float) -> None:
        """Take back a connection whose reply is complete."""
        connection.deadline = now_s + self.keep_idle_s
        self._idle.append(connection)

    def forget(self, connection: Upstream) -> None:
        """A connection was lost."""
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def expire(self, now: float) -> None:
        """Give up every wait whose deadline has passed."""
        for connection in [connection for connection in self.connections if connection.deadline < now]:
            connection.expire()

    def cut(self, why: str) -> None:
        """Give up every request in flight, as if its time were over."""
        for connection in self.connections - set(self._idle):
            connection.cut(why)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _send(self, head: bytes, body: Body, consumer: Consumer, patience: Patience) -> None:
        if self._idle:
            try:
                # The latest used is the least likely to have been closed meanwhile.
                await self._idle.pop().exchange(head, body, consumer, patience)
                return
            except UpstreamError as error:
                if not error.stale:
                    raise
            consumer.sent = False
        connection = await self._connect()
        await connection.exchange(head, body, consumer, patience)

    async def _connect(self) -> Upstream:
        loop = asyncio.get_running_loop()
        self._opening += 1
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Upstream(self, loop), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            message = f"{self.title} did not accept a connection for {self.connect_timeout_s:g} s"
            raise UpstreamError(message, "connect") from None
        except ssl.SSLError as error:
            raise UpstreamError(f"{self.title} cannot be trusted: {_why(error)}", "connect") from None
        except OSError:
            raise UpstreamError(f"{self.title} refused the connection", "connect") from None
        finally:
            self._opening -= 1
        # Not in `connection_made`: the loop tells a connection whose opening was cancelled of no loss.
        self.connections.add(connection)
        return connection


def _why(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; see --worker-ca"
    return f"TLS failed ({error.reason}); does it serve https?"
