"""What opens doors: the keys that clients must show, and the one that workers want.  Read at start, never shown."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.keys import Key, KeyRing, digest, load_keys
from coterie.gateway.edge.tls import server_context

ENV_KEY_CHARS = 16
"""The shortest key to be shown to the gateway that the environment may hold: shorter ones can be guessed."""

_KEY = re.compile(r"[!-~]{1,512}")


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of one gateway.

    Attributes:
        keys: one of them must be shown by each client; None lets everybody in.
        worker_headers: header lines that every request to a worker gets.
        tls: what clients are shown; None without TLS.
    """

    keys: KeyRing | None = None
    worker_headers: bytes = b""
    tls: ssl.SSLContext | None = None

    @property
    def passes_authorization(self) -> bool:
        """Whether workers get the client's Authorization header: not if it is for the gateway, or there is another."""
        return self.keys is None and not self.worker_headers


NO_ACCESS = Access()
"""Everybody is let in, and workers want no key."""


def read_access(config: GatewayConfig, environ: Mapping[str, str]) -> Access:
    """Read the files and environment variables that the configuration names.

    Raises:
        ConfigError: one cannot be read, or holds no key.
    """
    keys = load_keys(Path(config.api_keys)) if config.api_keys else []
    if config.api_key_env:
        keys.append(_shown_key(config.api_key_env, environ))
    lines = _bearer(config.worker_key_env, environ) if config.worker_key_env else b""
    return Access(
        keys=KeyRing(keys) if config.api_keys or config.api_key_env else None,
        worker_headers=lines,
        tls=server_context(config.tls_cert, config.tls_key) if config.tls_cert else None,
    )


def read_admin_keys(config: GatewayConfig, environ: Mapping[str, str]) -> KeyRing | None:
    """The key of the admin side; None if it has none.

    Raises:
        ConfigError: the environment variable that the configuration names holds no key.
    """
    return KeyRing([_shown_key(config.admin_key_env, environ)]) if config.admin_key_env else None


def peer_headers(config: GatewayConfig, environ: Mapping[str, str]) -> bytes:
    """Header lines that every message to a peer gets: all gateways have one key of the admin side.

    Raises:
        ConfigError: the environment variable that the configuration names holds no key.
    """
    return _bearer(config.admin_key_env, environ) if config.admin_key_env else b""


def _bearer(variable: str, environ: Mapping[str, str]) -> bytes:
    return b"authorization: Bearer %b\r\n" % _secret(variable, environ).encode("ascii")


def _shown_key(variable: str, environ: Mapping[str, str]) -> Key:
    secret = _secret(variable, environ)
    if len(secret) < ENV_KEY_CHARS:
        raise ConfigError(f"${variable}: a key has at least {ENV_KEY_CHARS} characters; `coterie key new` makes one")
    return Key(name=variable, sha256=digest(secret))


def _secret(variable: str, environ: Mapping[str, str]) -> str:
    """The value of a variable, which no message may show."""
    value = environ.get(variable, "")
    if not _KEY.fullmatch(value):
        raise ConfigError(f"${variable}: must be set to a key of 1 to 512 visible ASCII characters")
    return value
