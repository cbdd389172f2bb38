"""The files and environment variables that a configuration names, read and checked before anything goes by them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.activations import ActivationTrace
from coterie.calibration import Profile
from coterie.errors import ConfigError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.edge.access import Access, read_access

Versions = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What was in them.

    Attributes:
        profile: what decode workers are chosen by; None without one.
        trace: labelled requests, for the policy domain; None without them.
        access: the keys.
        versions: of the files of routing: others mean that they were replaced or written to.
    """

    profile: Profile | None
    trace: ActivationTrace | None
    access: Access
    versions: Versions


def read_inputs(config: GatewayConfig, environ: Mapping[str, str]) -> Inputs:
    """Read the files and environment variables that a configuration names.

    Raises:
        InputError: one cannot be read, is damaged, or holds no key.
    """
    # The versions first: of a file that is replaced meanwhile it is the old one's, and the next reload sees a change.
    versions = tuple(_version(name) for name in (config.profile, config.trace))
    profile = Profile.load(Path(config.profile)) if config.profile else None
    trace = ActivationTrace.load(Path(config.trace)) if config.trace else None
    return Inputs(profile, trace, read_access(config, environ), versions)


def _version(file: str | None) -> tuple[int, int, int] | None:
    if file is None:
        return None
    try:
        found = os.stat(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    return found.st_ino, found.st_mtime_ns, found.st_size
