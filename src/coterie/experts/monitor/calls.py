"""How servers, clients and commands talk to the monitor: plain HTTP from threads, by the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from coterie.decoding import UNREADABLE
from coterie.errors import ConfigError, EngineError, InputError
from coterie.experts.monitor.messages import BEAT_S, MAX_LINE_BYTES, Problem
from coterie.experts.view import Message

TIMEOUT_S = 2.0
"""The longest that an answer may take."""
SILENCE_S = 3 * BEAT_S
"""Silence on a held connection after which it is given up."""
_MAX_REPLY_BYTES = 64 << 20
_T = TypeVar("_T")
_ANY_MESSAGE: Any = Message


class RefusedError(EngineError):
    """The monitor says no.

    Attributes:
        status: of its answer; 404 means that it does not know the server.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def check_url(url: str) -> SplitResult:
    """The parts of a monitor's URL.

    Raises:
        ConfigError: it is none.
    """
    parts = urlsplit(url)
    try:
        usable = parts.scheme == "http" and parts.hostname and parts.path in ("", "/") and not parts.query
        if not usable or parts.port is None:
            raise ValueError
    except ValueError:
        raise ConfigError(f"expert monitor {url!r}: must be http://HOST:PORT") from None
    return parts


def ask(url: str, method: str, path: str, reply: type[_T], body: Any = None, *, who: str = "the expert monitor") -> _T:
    """Ask the monitor something, or a server.

    Args:
        url: of it.
        method: of HTTP.
        path: what is asked.
        reply: type of the answer.
        body: sent as JSON; None for none.
        who: it is, for errors.

    Raises:
        ConfigError: `url` is none.
        RefusedError: it says no.
        EngineError: it cannot be reached, or does not answer as it should.
    """
    with contextlib.closing(_connection(url, TIMEOUT_S)) as connection:
        try:
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            with connection.getresponse() as answer:
                content = answer.read(_MAX_REPLY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{who} at {url} cannot be reached: {error}; is it running?") from None
    if answer.status != 200:
        raise RefusedError(_read(url, content, Problem).problem, answer.status)
    return _read(url, content, reply)


class HeldLines:
    """The monitor's messages to a follower, over a connection that is held; a context manager.

    Args:
        url: of the monitor.
        run: the monitor that was followed before; empty for none.
        after: the last epoch that is known.

    Raises:
        ConfigError: `url` is none.
    """

    def __init__(self, url: str, run: str, after: int) -> None:
        self._url, self._path = url, f"/members?run={run}&after={after}"
        self._connection = _connection(url, SILENCE_S)

    def __iter__(self) -> Iterator[Message]:
        """Each message when it comes; ends with the connection.

        Raises:
            EngineError: the monitor cannot be reached, was silent for too long, or is no monitor.
        """
        try:
            self._connection.request("GET", self._path)
            answer = self._connection.getresponse()
            if answer.status != 200:
                raise RefusedError(_read(self._url, answer.read(MAX_LINE_BYTES), Problem).problem, answer.status)
            while line := answer.readline(MAX_LINE_BYTES):
                yield _read(self._url, line, _ANY_MESSAGE)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineError(f"the expert monitor at {self._url} is away: {error}") from None

    def cut(self) -> None:
        """End the connection from another thread, which iterates."""
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> HeldLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = check_url(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


def _read(url: str, content: bytes, type_: type[_T]) -> _T:
    try:
        return msgspec.json.decode(content, type=type_)
    except (*UNREADABLE, InputError) as error:
        raise EngineError(f"{url} does not answer as it should: {error}") from None
