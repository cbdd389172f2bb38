"""The two directions of a TCP connection whose socket never waits."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterable
from typing import TypeAlias

from coterie.experts.protocol.frames import Bytes

SILENCE_S = 5
"""A host that acknowledges nothing for so long is taken for gone, also while there is nothing to send."""
_PROBE_IDLE_S, _PROBE_EVERY_S = 2, 1
Parser: TypeAlias = Generator[memoryview, None, None]
"""Yields memory that is to be filled, one piece after the other."""


def prepare(sock: socket.socket) -> None:
    """Have a socket neither wait nor hold back small pieces, and notice the loss of the other side's host."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_loss(sock)


def notice_loss(sock: socket.socket) -> None:
    """Have a socket, and those that it accepts, fail when the other side's host is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


class Outbox:
    """What is to be sent, in pieces that are not copied."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pieces: list[Bytes] = []

    def __len__(self) -> int:
        return len(self._pieces)

    def send(self, pieces: Iterable[Bytes]) -> None:
        """Send what goes now, after all that was to be sent before; `flush` does the rest.

        Raises:
            OSError: the connection is lost.
        """
        self._pieces += pieces
        self.flush()

    def flush(self) -> None:
        """Send more of it; raises as `send`."""
        while self._pieces:
            try:
                sent = self._sock.sendmsg(self._pieces)
            except BlockingIOError:
                return
            self._pieces = _rest(self._pieces, sent)

    def take_back(self, first: Bytes) -> bool:
        """Do not send this piece and those after it; False if some of it is sent, and the rest must follow."""
        place = next((place for place, piece in enumerate(self._pieces) if piece is first), None)
        if place is not None:
            del self._pieces[place:]
        return place is not None

    def keep(self) -> None:
        """Copy what is left, whose memory the sender will use for something else."""
        self._pieces = [bytes(piece) for piece in self._pieces]


def _rest(pieces: list[Bytes], sent: int) -> list[Bytes]:
    for place, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:] if sent else piece, *pieces[place + 1 :]]
        sent -= len(piece)
    return []


class Inbox:
    """Fills the memory that a parser asks for with what comes."""

    def __init__(self, sock: socket.socket, parser: Parser) -> None:
        self._sock, self._parser = sock, parser
        self._wanted = next(parser)

    def read(self) -> None:
        """Read what has come, a line and what belongs to it at most.

        Raises:
            OSError: the connection is lost, or was closed by the other side.
            WireError: the parser does not like what came.
        """
        for _ in range(2):
            try:
                size = self._sock.recv_into(self._wanted)
            except BlockingIOError:
                return
            if not size:
                raise ConnectionError("closed by the other side")
            self._wanted = self._wanted[size:]
            while not self._wanted:
                self._wanted = next(self._parser)
