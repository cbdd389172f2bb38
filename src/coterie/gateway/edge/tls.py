"""TLS on either side: what clients see, and whom the gateway trusts to be a worker."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from functools import lru_cache

from coterie.errors import ConfigError

HANDSHAKE_S = 10.0
"""How long a client may take to agree on keys."""
CLOSING_S = 5.0
"""How long a client may take to say that it has heard the end."""

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, those with forward secrecy and authenticated encryption; all of TLS 1.3 are such."""


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """What clients are shown: TLS 1.2 or 1.3, HTTP/1.1.

    Args:
        certificate: PEM file with the certificate and those that lead from it to a root.
        key: PEM file with its private key; by default that is in the same file.

    Raises:
        ConfigError: a file cannot be read, the key is encrypted, or it is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    where = certificate if key is None else f"{certificate} and {key}"
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls: {where}: {error}; give PEM files, the key without a password") from None
    return context


def following(first: ssl.SSLContext, current: Callable[[], ssl.SSLContext | None]) -> ssl.SSLContext:
    """A context to listen with that shows whoever connects the certificate of the one that is current then.

    The certificate of a context in use could be replaced, too, but not together with its key.
    """

    def switch(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = current() or first

    first.sni_callback = switch  # called for every client, whether it names a server or not
    return first


@lru_cache(maxsize=8)
def worker_context(authorities: str | None) -> ssl.SSLContext:
    """How workers are known: by a certificate for the host in their URL.

    Args:
        authorities: PEM file with the certificates that vouch for workers'; by default those of the system do.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ConfigError(f"worker_ca: {authorities}: {error}; give a PEM file of certificates") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_password() -> str:
    """Without this, a key with a password would be asked for at the terminal."""
    raise ValueError("the key is encrypted")
