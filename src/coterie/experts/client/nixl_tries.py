"""Connections by NIXL, each of which is a try: whether a network serves is only seen when it is used."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from coterie.clock import Clock, SystemClock
from coterie.errors import EngineError, GoneError, UnsupportedError, WireError
from coterie.experts.client.table import Server
from coterie.experts.transport.nixl import NixlClient
from coterie.experts.transport.pending import FullError

_log = logging.getLogger("coterie.experts")
AGAIN_S = 5.0
"""How long a server that cannot be reached is not tried again: one that was may have its slot rest for as long."""
AGAIN_WITH_TCP_S = 60.0
"""The same, where TCP serves meanwhile."""
_REMEDY = "set UCX_TLS or UCX_NET_DEVICES to a network of both hosts, or start the server with --tcp-port"


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    again_s: float


class NixlTries:
    """Tries to reach servers by NIXL, of one client, be it from several threads.

    A try costs a slot that then rests, and may cost seconds, so one that failed is not made again soon.

    Args:
        clock: the time.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._unsent: set[NixlClient] = set()
        self._failures: dict[Server, _Failure] = {}

    def connect(self, server: Server, known_by: str, *, or_tcp: bool) -> NixlClient | None:
        """A connection to a server; None if that fails, or did a while ago, and there is TCP.

        Args:
            server: which one.
            known_by: its id.
            or_tcp: whether it can be reached by TCP, too.

        Raises:
            GoneError: another server has its URL.
            FullError: it has no slot now.
            EngineError: it cannot be reached by NIXL.
        """
        failure = self._failures.get(server)
        if failure is None or self._clock.now() >= failure.again_s:
            try:
                return NixlClient(server.url, known_by, server.name, self._unsent)
            except (GoneError, FullError):
                raise
            except (EngineError, UnsupportedError, WireError) as error:
                failure = self._note(server, error, or_tcp)
        if or_tcp:
            return None
        raise EngineError(f"{failure.why}; {_REMEDY}")

    def _note(self, server: Server, problem: Exception, or_tcp: bool) -> _Failure:
        why = f"expert server {server.name} cannot be reached by NIXL: {problem}"
        if or_tcp:  # else who is told so says it
            _log.warning("%s; by TCP for %g s", why, AGAIN_WITH_TCP_S)
        again_s = self._clock.now() + (AGAIN_WITH_TCP_S if or_tcp else AGAIN_S)
        self._failures[server] = failure = _Failure(why, again_s)
        return failure
