"""URLs of workers and peers."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from coterie.errors import ConfigError
from coterie.http_server import address_url

Address = tuple[str, int, bytes, bool]
"""Host, port and path prefix of a worker, and whether it speaks TLS."""


def split_url(url: str) -> Address:
    """Host, port and path prefix of a URL, and whether it is https.

    Raises:
        ConfigError: it is not an http or https URL of a host.
    """
    if strange := re.search(r"[^!-~]", url):  # urlsplit drops some of them, and others would end a request line
        raise ConfigError(f"URL {url!r}: {strange[0]!r} cannot be part of a URL; write it as %XX")
    try:
        parts = urlsplit(url)
        port = (443 if parts.scheme == "https" else 80) if parts.port is None else parts.port
    except ValueError as error:
        raise ConfigError(f"URL {url!r}: {error}") from None
    beyond = parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or beyond:
        raise ConfigError(
            f"URL {url!r}: expected http://HOST:PORT or https://HOST:PORT, without user, query or fragment"
        )
    try:
        parts.hostname.encode("idna")  # as it is done when a connection is opened
    except UnicodeError as error:
        raise ConfigError(f"URL {url!r}: {parts.hostname!r} is no name of a host: {error}") from None
    return parts.hostname, port, parts.path.rstrip("/").encode(), parts.scheme == "https"


def plain_url(url: str) -> str:
    """The one form of all URLs that mean the same.

    Raises:
        ConfigError: see `split_url`.
    """
    host, port, prefix, tls = split_url(url)
    return address_url(host, port, tls=tls) + prefix.decode()
