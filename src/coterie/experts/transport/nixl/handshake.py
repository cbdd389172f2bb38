"""How a client gets a slot: by an HTTP request to the server whose answer does not end while the client has it.

    GET /nixl?server=ID    404: the server was started without --nixl     409: another one is meant
                           503: no slot is free                           200: `Invitation`, then silence

So either side sees at once that the other's process has ended, since the kernel closes the connection, and within
`streams.SILENCE_S` that its host has.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import quote

import msgspec

from coterie.errors import EngineError, GoneError, InputError, WireError
from coterie.experts.monitor.calls import check_url
from coterie.experts.monitor.messages import Problem
from coterie.experts.protocol import SlotShape
from coterie.experts.transport.pending import FullError
from coterie.experts.transport.tcp.streams import prepare

_T = TypeVar("_T")
PATH = "/nixl"
ANSWER_S = 2.0
"""The longest that connecting may take, and the answer."""
MAX_BYTES = 1 << 20
"""Of an invitation; NIXL's metadata grow with the networks of a host, and have some KiB for each."""


class Invitation(msgspec.Struct, frozen=True):
    """What a client needs to use a slot.

    Attributes:
        server: id of the server.
        metadata: of its agent: how it is reached, and the key to this slot alone.
        address: where the slot lies in the server's memory.
        sequence: number that the client counts on from.
        shape: what it carries.
    """

    server: str
    metadata: bytes
    address: int
    sequence: int
    shape: SlotShape


class Hold:
    """A client's hold of a slot.

    Args:
        url: the server's HTTP side.
        server: id of the server that is meant.
        name: of it, for errors.

    Attributes:
        invitation: to the slot.

    Raises:
        GoneError: another server has its URL.
        FullError: it has no slot now.
        EngineError: it cannot be reached, or does not take NIXL.
        WireError: the answer is none.
    """

    def __init__(self, url: str, server: str, name: str) -> None:
        parts = check_url(url)
        self._name = name
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
        try:
            self.invitation = self._ask(server)
            self._socket = self._connection.sock
            if self._socket is None:
                raise WireError("expert server's invitation: its connection ends with it, so it gives no slot")
            prepare(self._socket)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Check that the slot is still this client's.

        Raises:
            EngineError: it is not: the server has ended, or its host cannot be reached.
        """
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            raise EngineError(f"expert server {self._name}: connection lost: {error}") from error
        raise EngineError(f"expert server {self._name}: connection lost: closed by the other side")

    def close(self) -> None:
        """Leave the slot to others."""
        self._connection.close()

    def _ask(self, server: str) -> Invitation:
        try:
            self._connection.connect()
            with _cut_after(ANSWER_S, self._connection.sock):
                self._connection.request("GET", f"{PATH}?server={quote(server)}")
                answer = self._connection.getresponse()
                line = answer.readline(MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"expert server {self._name} cannot be reached: {error}") from error
        if answer.status != 200:
            refusal = {409: GoneError, 503: FullError}.get(answer.status, EngineError)
            raise refusal(f"expert server {self._name}: {_read(line, Problem).problem}")
        invitation = _read(line, Invitation)
        if invitation.server != server:
            raise GoneError(f"expert server {self._name} died; another one has its URL")
        return invitation


@contextlib.contextmanager
def _cut_after(limit_s: float, sock: socket.socket) -> Iterator[None]:
    """Bound how long a socket is read from: its own time-out begins anew with each piece that comes."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit_s, cut)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"no whole answer in {limit_s} s")


def _read(line: bytes, type_: type[_T]) -> _T:
    try:
        return msgspec.json.decode(line, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InputError) as error:
        raise WireError(f"expert server's invitation: {error}") from None
