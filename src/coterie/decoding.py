"""What goes wrong where bytes from elsewhere are decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from coterie.errors import WireError

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises: not the format, another type than wanted, text that is no UTF-8, nesting without end."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Say of what is decoded within the block what is wrong with it.

    Raises:
        WireError: it cannot be decoded.
    """
    try:
        yield
    except UNREADABLE as error:
        raise WireError(f"{what}: {error}") from None
