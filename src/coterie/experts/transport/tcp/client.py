"""The client's end of TCP connections to expert servers."""

from __future__ import annotations

import select
import socket
import time

import numpy as np

from coterie.errors import EngineError, GoneError, InputError, WireError
from coterie.experts.protocol import Reply, Request, SlotShape
from coterie.experts.protocol.frames import (
    Bytes,
    Welcome,
    read_answer,
    read_reply_head,
    write_call,
    write_request,
    write_withdrawal,
)
from coterie.experts.protocol.layout import LINE
from coterie.experts.transport.pending import FullError, Pending, PendingAt
from coterie.experts.transport.tcp.streams import Inbox, Outbox, Parser, prepare

CONNECT_S = 2.0
"""The longest that connecting may take."""


class TcpClient:
    """A connection to a server, which is one of its slots, for one request at a time.

    Args:
        address: host and port.
        server: token of the server that is meant.
        name: of it, for errors.
        unsent: clients of this thread that have something to send.  While one waits for a reply, it sends for all; give
            the same set to clients that are used together.

    Attributes:
        shape: the most that a request can carry.

    Raises:
        EngineError: the server cannot be reached, or is another one; a `FullError`, if all its slots are taken.
        WireError: what is there is no expert server.
    """

    def __init__(
        self, address: tuple[str, int], server: bytes, name: str, unsent: set[TcpClient] | None = None
    ) -> None:
        self._name = name
        self._unsent = set() if unsent is None else unsent
        self._socket: socket.socket | None = None
        sock = _connect(address, name)
        try:
            self.shape = _enter(sock, server, name)
            prepare(sock)
        except BaseException:
            sock.close()
            raise
        self._socket, self._outbox, self._inbox = sock, Outbox(sock), Inbox(sock, self._replies())
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._sequence = self._wanted = 0
        self._line: Bytes = b""
        self._reply: Reply | None = None
        self._problem: Exception | None = None

    def post(self, request: Request) -> Pending:
        """Send a request, and do not wait.  What is returned must be waited for or withdrawn before the next one.

        Its arrays must not change before.

        Raises:
            InputError: the request does not fit the slot, or this client is closed.
        """
        if self._socket is None and self._problem is None:
            raise InputError(f"expert server {self._name}: this client is closed")
        assert not self._wanted, "the last request was neither taken nor withdrawn"
        pieces = write_request(self.shape, self._sequence + 1, request)
        self._sequence = self._wanted = self._sequence + 1
        self._line = pieces[0]
        self._send(pieces)
        return PendingAt(self, self._sequence, self._name)

    def call(self, request: Request, timeout_s: float) -> Reply:
        """Send a request and wait for its reply: `post`, then `Pending.wait`."""
        return self.post(request).wait(time.monotonic() + timeout_s)

    def close(self) -> None:
        """End the connection, and so leave the slot to others."""
        self._unsent.discard(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno() if self._socket else -1

    def look(self, until_s: float) -> Reply | None:
        """The reply to the last request, if it comes by then; see `Pending.look`."""
        try:
            return self._await(until_s)
        except (OSError, WireError) as error:
            self._fail(error)
            raise error if isinstance(error, WireError) else self._lost(error) from error

    def withdraw(self, sequence: int) -> None:
        """Want no reply to this request any more, if it is still wanted."""
        if self._wanted != sequence:
            return
        self._wanted = 0
        if self._problem is None and not self._outbox.take_back(self._line):
            self._outbox.keep()
            self._send([write_withdrawal(sequence)])

    def _await(self, until_s: float) -> Reply | None:
        while True:
            if self._problem is not None:
                raise self._problem
            left_s = max(0.0, until_s - time.monotonic())
            if self._poll(left_s):
                self._inbox.read()
            if self._reply is not None:
                reply, self._reply = self._reply, None
                return reply
            if not left_s:
                return None

    def _poll(self, left_s: float) -> bool:
        """Wait until something has come, and send meanwhile what is unsent; whether to look again at what came."""
        if not self._unsent:
            return bool(self._poller.poll(1000 * left_s))
        poller = select.poll()
        poller.register(self, select.POLLIN)
        for client in self._unsent:
            poller.register(client, select.POLLOUT | (select.POLLIN if client is self else 0))
        ready = {descriptor for descriptor, _ in poller.poll(1000 * left_s)}
        mine = self.fileno() in ready
        for client in tuple(self._unsent):
            if client.fileno() in ready:
                client._send(())
        return mine

    def _send(self, pieces: list[Bytes] | tuple[()]) -> None:
        if self._problem is None:
            try:
                self._outbox.send(pieces)
            except OSError as error:
                self._fail(error)
        (self._unsent.add if self._problem is None and self._outbox else self._unsent.discard)(self)

    def _replies(self) -> Parser:
        """Takes the reply that is wanted; those to requests that were withdrawn are read, and forgotten."""
        while True:
            line = memoryview(bytearray(LINE))
            yield line
            head = read_reply_head(self.shape, line)
            if head.sequence > self._sequence:
                raise WireError(f"expert server {self._name}: reply to request {head.sequence} of {self._sequence}")
            body = np.empty(head.size, np.uint8)
            yield body.data
            if head.sequence == self._wanted:
                self._wanted, self._reply = 0, head.reply(body)

    def _fail(self, problem: Exception) -> None:
        """The connection is of no use any more."""
        self._problem, self._wanted = problem, 0
        self.close()

    def _lost(self, error: OSError) -> EngineError:
        return EngineError(f"expert server {self._name}: connection lost: {error}")


def _connect(address: tuple[str, int], name: str) -> socket.socket:
    try:
        return socket.create_connection(address, CONNECT_S)
    except OSError as error:
        where = f"{address[0]} port {address[1]}"
        raise EngineError(f"expert server {name} cannot be reached at {where}: {error}") from None


def _enter(sock: socket.socket, server: bytes, name: str) -> SlotShape:
    """Say who is meant, and hear what a slot carries."""
    try:
        sock.sendall(write_call(server))
        line = _receive_line(sock)
    except OSError as error:
        raise EngineError(f"expert server {name} did not let this client in: {error}") from None
    welcome, shape, slots = read_answer(line)
    if welcome is Welcome.FULL:
        raise FullError(f"expert server {name}: all {slots} slots for TCP are taken; start it with more")
    if welcome is Welcome.STRANGER:
        raise GoneError(f"expert server {name} died; another one has its port")
    return shape


def _receive_line(sock: socket.socket) -> bytes:
    line = b""
    while len(line) < LINE:
        piece = sock.recv(LINE - len(line))
        if not piece:
            raise ConnectionError("closed by the other side")
        line += piece
    return line
