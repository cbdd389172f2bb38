"""The server's end of TCP connections: a thread that reads requests; who computes them sends the replies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

from coterie.errors import EngineError, WireError
from coterie.experts.protocol import Reply, Request, SlotShape
from coterie.experts.protocol.frames import (
    Bytes,
    Head,
    Welcome,
    Withdrawal,
    read_call,
    read_head,
    read_request,
    write_answer,
    write_reply,
)
from coterie.experts.protocol.layout import LINE
from coterie.experts.transport.inlet import Ready
from coterie.experts.transport.shared import SharedServer
from coterie.experts.transport.tcp.streams import Inbox, Outbox, Parser, prepare

_log = logging.getLogger("coterie.experts")

HELLO_S = 5.0
"""The longest that a connection may take to say its hello."""
NEWCOMERS = 64
"""Connections that have not said it yet, at most."""
_NO_DESCRIPTOR_S = 0.1  # how long to wait before the next try where the process has no file descriptor left


class TcpServer:
    """One way into an `Intake`.  It reads no more than one request of a client ahead.

    Args:
        listener: a listening socket, which is its from now on.
        token: 16 random bytes, by which clients know that they are at the right server.
        shared: the slots in shared memory, which those of TCP are like, and at whose doorbell the server sleeps.
        slots: how many clients by TCP at a time, one or more.

    Attributes:
        address: host and port.
    """

    def __init__(self, listener: socket.socket, token: bytes, shared: SharedServer, slots: int) -> None:
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._shape, self._slots, self._token, self._ring = shared.shape, slots, token, shared.ring
        self._listener = listener
        listener.setblocking(False)
        self._connections: dict[int, _Connection] = {}
        self._posted: deque[_Connection] = deque()
        self._problem: BaseException | None = None
        self._epoll, self._over = select.epoll(), os.eventfd(0)
        for descriptor in (listener.fileno(), self._over):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="expert-tcp", daemon=True)
        self._thread.start()

    @property
    def clients(self) -> int:
        """See `Inlet`."""
        return sum(one.admitted for one in tuple(self._connections.values()))

    @property
    def waiting(self) -> int:
        """See `Inlet`."""
        return sum(one.wanted != 0 for one in tuple(self._connections.values()))

    def pick_up(self) -> list[Ready]:
        """See `Inlet`.

        Raises:
            EngineError: the reading thread has stopped by itself.
        """
        if self._problem is not None:
            raise EngineError(f"the expert server reads no more from TCP: {self._problem!r}")
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        return [ready for one in posted if (ready := one.pick_up()) is not None]

    def close(self) -> None:
        """End all connections, and listen no more."""
        os.eventfd_write(self._over, 1)
        self._thread.join()
        for one in self._connections.values():
            one.close()
        self._listener.close()
        self._epoll.close()
        os.close(self._over)

    # --- in the reading thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._problem = error
            self._ring()

    def _turn(self) -> bool:
        """Wait for news, and see to them; False when it is over."""
        newcomers = [one for one in self._connections.values() if not one.admitted]
        for descriptor, events in self._epoll.poll(HELLO_S if newcomers else None):
            if descriptor == self._over:
                return False
            if descriptor == self._listener.fileno():
                self._accept(len(newcomers))
            else:
                self._serve(self._connections[descriptor], events)
        for one in newcomers:
            if not one.admitted and one.since_s < time.monotonic() - HELLO_S:
                self._drop(one, "no hello")
        return True

    def _accept(self, newcomers: int) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            _log.warning("no connection can be taken: %s", error)
            time.sleep(_NO_DESCRIPTOR_S)
            return
        if newcomers >= NEWCOMERS:
            sock.close()
            return
        prepare(sock)
        one = _Connection(sock, f"{address[0]} port {address[1]}", self._epoll, self._shape, self._greet, self._post)
        self._connections[sock.fileno()] = one

    def _serve(self, one: _Connection, events: int) -> None:
        try:
            one.serve(events)
        except WireError as error:
            self._drop(one, str(error))
        except OSError as error:
            self._drop(one, None)
            _log.debug("%s left: %s", one.name, error)

    def _greet(self, token: bytes) -> tuple[Welcome, bytes]:
        """What to say to a client that means the server of this token."""
        if token != self._token:
            welcome = Welcome.STRANGER
        else:
            welcome = Welcome.FULL if self.clients >= self._slots else Welcome.IN
        return welcome, write_answer(welcome, self._shape, self._slots)

    def _post(self, one: _Connection) -> None:
        self._posted.append(one)
        self._ring()

    def _drop(self, one: _Connection, problem: str | None) -> None:
        if problem:
            _log.warning("%s is cut off: %s", one.name, problem)
        self._connections.pop(one.descriptor, None)
        one.close()


class _Connection:
    """A client's connection.  The reading thread reads, the computing one picks up and replies; a lock is between them.

    Attributes:
        name: for people.
        descriptor: of its socket.
        since_s: when it was made.
        admitted: whether it has a slot.
        wanted: number of the request that waits for its reply; 0 for none.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        epoll: select.epoll,
        shape: SlotShape,
        greet: Callable[[bytes], tuple[Welcome, bytes]],
        post: Callable[[_Connection], None],
    ) -> None:
        self.name, self.descriptor, self.since_s = name, sock.fileno(), time.monotonic()
        self._socket, self._epoll, self._shape, self._greet, self._announce = sock, epoll, shape, greet, post
        self._lock = threading.Lock()
        self._outbox, self._inbox = Outbox(sock), Inbox(sock, self._lines())
        self._last, self.wanted, self.admitted = 0, 0, False
        self._fresh: Request | WireError | None = None
        self._announced = False
        epoll.register(sock, select.EPOLLIN)

    def serve(self, events: int) -> None:
        """Send and read what can be.

        Raises:
            OSError: the connection is lost.
            WireError: the client breaks the protocol in such a way that there is nothing more to read.
        """
        if events & select.EPOLLOUT:
            with self._lock:
                self._flush(())
        if events & ~select.EPOLLOUT:
            self._inbox.read()

    def pick_up(self) -> Ready | None:
        """The request that was not picked up yet."""
        with self._lock:
            self._announced, fresh, self._fresh = False, self._fresh, None
            return None if fresh is None else Ready(fresh, partial(self._reply, self.wanted))

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._fresh, self.wanted, self.admitted = None, 0, False
            self._socket.close()

    def _reply(self, sequence: int, reply: Reply) -> None:
        with self._lock:
            if self.wanted == sequence:
                self.wanted = 0
                with contextlib.suppress(OSError):  # the reading thread sees it, too
                    self._flush(write_reply(self._shape, sequence, reply))

    def _flush(self, pieces: Iterable[Bytes]) -> None:
        """Send; while something is left, nothing more is read of this client."""
        before = len(self._outbox)
        self._outbox.send(pieces)
        if bool(before) != bool(self._outbox):
            self._epoll.modify(self.descriptor, select.EPOLLOUT if self._outbox else select.EPOLLIN)

    def _lines(self) -> Parser:
        line = memoryview(bytearray(LINE))
        yield line
        welcome, answer = self._greet(read_call(line))
        self._outbox.send([answer])
        if welcome is not Welcome.IN:
            raise ConnectionError(welcome.name.lower())
        self.admitted = True
        while True:
            line = memoryview(bytearray(LINE))
            yield line
            head = read_head(self._shape, line)
            if isinstance(head, Withdrawal):
                self._withdraw(head.sequence)
            else:
                body = np.empty(head.size, np.uint8)
                yield body.data
                self._post(head, body)

    def _withdraw(self, sequence: int) -> None:
        with self._lock:
            if self.wanted == sequence:
                self._fresh, self.wanted = None, 0

    def _post(self, head: Head, body: npt.NDArray[np.uint8]) -> None:
        if head.sequence <= self._last:
            raise WireError(f"expert request: number {head.sequence} after {self._last}")
        fresh: Request | WireError
        try:
            fresh = read_request(self._shape, head, body)
        except WireError as error:
            fresh = error
        with self._lock:
            self._last = self.wanted = head.sequence
            self._fresh = fresh
            announced, self._announced = self._announced, True
        if not announced:
            self._announce(self)
