"""API keys: what clients must show, kept as hashes, and how much each may ask for.

Of keys that are known, only SHA-256 digests are kept.  A slow hash such as scrypt protects passwords, which can be
guessed; a key made by `new_key` has 256 random bits, which cannot, and a slow hash for each request would be an
attack on the gateway itself.  A key is found by its digest: how long that takes depends on digests alone, which
nobody can choose without knowing the key, so it tells nothing that could be used.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coterie.errors import ConfigError
from coterie.gateway.config import read_yaml

_BEARER = re.compile(rb"bearer +([!-~]{1,512})", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("max_in_flight", "requests_per_minute", "tokens_per_minute")
_FIELDS = ("name", "sha256", *_LIMITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A client's key, and how much it may ask for at once; None for no limit.

    Attributes:
        name: what logs and metrics call it.
        sha256: digest of the key, as 64 lower-case hexadecimal digits.
        max_in_flight: requests that it may have under way, waiting ones included.
        requests_per_minute: see `quota.Quota`.
        tokens_per_minute: see `quota.Quota`.

    Raises:
        ConfigError: a value is out of range.
    """

    name: str
    sha256: str
    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def limited(self) -> bool:
        """Whether it has any limit."""
        return any(getattr(self, limit) is not None for limit in _LIMITS)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"key {self.name!r}: a name is 1 to 64 letters, digits and . _ @ - and begins with neither"
            )
        if not _DIGEST.fullmatch(self.sha256):
            raise ConfigError(f"key {self.name}: sha256 must be 64 hexadecimal digits; `coterie key new` makes them")
        for limit in _LIMITS:
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise ConfigError(
                    f"key {self.name}: {limit} must be at least 1, got {value}; leave it out for no limit"
                )


class KeyRing:
    """All keys that are taken.

    Raises:
        ConfigError: there is none, or two have one name or one digest.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self._by_digest: dict[bytes, Key] = {}
        names: set[str] = set()
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            if key.name in names or digest in self._by_digest:
                raise ConfigError(f"key {key.name}: its name or its sha256 is there twice; take one out")
            names.add(key.name)
            self._by_digest[digest] = key
        if not names:
            raise ConfigError("no API key is given; make one with `coterie key new NAME`")

    def __contains__(self, key: Key) -> bool:
        return self._by_digest.get(bytes.fromhex(key.sha256)) == key

    def find(self, authorization: bytes | None) -> Key | None:
        """The key that an Authorization header shows; None if it shows none that is known."""
        shown = _BEARER.fullmatch(authorization or b"")
        return self._by_digest.get(hashlib.sha256(shown[1]).digest()) if shown else None


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return f"coterie-{secrets.token_urlsafe(32)}"


def digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(file: Path) -> list[Key]:
    """Read a key file: YAML, a list of mappings with the fields of `Key`.

    Raises:
        ConfigError: it cannot be read, or a key is wrong; the message names it.
    """
    listed = read_yaml(file)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{file}: expected a list of keys, each as `coterie key new` prints it")
    for entry in listed:
        if unknown := entry.keys() - _FIELDS:
            raise ConfigError(
                f"{file}: unknown fields {', '.join(sorted(map(str, unknown)))}; known are {', '.join(_FIELDS)}"
            )
    try:
        return msgspec.convert(listed, list[Key])
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from None
