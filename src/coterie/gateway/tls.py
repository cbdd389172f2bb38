"""TLS on either side: what clients see, and whom the gateway trusts to be a worker."""

from __future__ import annotations

import ipaddress
import ssl
from functools import lru_cache

from coterie.errors import ConfigError

HANDSHAKE_S = 10.0
"""How long a client may take to agree on keys."""
CLOSING_S = 5.0
"""How long a client may take to say that it has heard the end."""

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2, those with forward secrecy and authenticated encryption; all of TLS 1.3 are such."""


@lru_cache(maxsize=8)
def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """What clients are shown: TLS 1.2 or 1.3, HTTP/1.1.  The same files give the same context, for all ports.

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
    _load(context, certificate, key)
    return context


def _load(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    where = certificate if key is None else f"{certificate} and {key}"
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls: {where}: {error}; give PEM files, the key without a password") from None


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
