"""TCP ports for a local cluster."""

from __future__ import annotations

import socket

from coterie.errors import ConfigError

_FREE_RANGE = range(20000, 32000)
"""Below the range from which Linux takes the ports of outgoing connections, so that none of those takes a
port between its choice here and the moment, a minute later, when the server listens."""

_STRIDE = 101
"""Between the first ports of processes with neighbouring ids, so that those that start together do not choose alike;
prime to the length of the range."""


class PortChooser:
    """Hands out ports of 127.0.0.1, each at most once."""

    def __init__(self, start: int) -> None:
        """Look for free ports from a place that `start` gives, any whole number: the process id will do."""
        self._offset = start * _STRIDE
        self._given: set[int] = set()

    def ports(self, first: int, count: int, what: str) -> list[int]:
        """`count` ports: consecutive from `first`, or any free ones if `first` is 0.

        Raises:
            ConfigError: a named port is in use or given twice.
        """
        if first == 0:
            return [self._free() for _ in range(count)]
        chosen = list(range(first, first + count))
        for port in chosen:
            if port > 65535 or port in self._given or not _is_free(port):
                raise ConfigError(f"{what}: port {port} is not free; choose another first port, or 0 for free ones")
        self._given.update(chosen)
        return chosen

    def _free(self) -> int:
        for _ in _FREE_RANGE:
            self._offset += 1
            port = _FREE_RANGE[self._offset % len(_FREE_RANGE)]
            if port not in self._given and _is_free(port):
                self._given.add(port)
                return port
        raise ConfigError(f"no free port from {_FREE_RANGE.start} to {_FREE_RANGE.stop - 1}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
