"""The counts envelope in a prefill server's reply, taken out before the reply is parsed.

Of a reply nearly all is one string, the counts in base64.  A JSON parser looks at each of its characters, and who
decodes base64 does so again; to find where it ends takes a tenth of the time.
"""

from __future__ import annotations

import re

import msgspec

from coterie import wire
from coterie.core import ExpertCounts
from coterie.decoding import UNREADABLE
from coterie.errors import WireError

_KEY = b'"%b":' % wire.PROMPT_KEY.encode()
_COUNTS = re.compile(rb'"counts": ?"')
_EMPTY = re.compile(rb'.*"counts": ?""\s*\}', re.DOTALL)
"""A quote within a JSON string is escaped, so these bytes are never part of one."""


def cut_out(reply: bytes) -> tuple[bytes, bytes]:
    """A reply with an empty string for the first counts behind the envelope's key, and what stood there.

    The whole reply and nothing, where there is no such string or it has escapes.  The counts are the envelope's if
    `lacks_counts` says so.
    """
    key = reply.find(_KEY)
    found = None if key < 0 else _COUNTS.search(reply, key)
    if found is None:
        return reply, b""
    start = found.end()
    stop = reply.find(b'"', start)
    counts = reply[start:stop]
    return (reply, b"") if stop < 0 or b"\\" in counts else (reply[:start] + reply[stop:], counts)


def lacks_counts(envelope: msgspec.Raw | None) -> bool:
    """Whether this is an envelope whose counts, its last field, were cut out."""
    return envelope is not None and _EMPTY.fullmatch(bytes(envelope)) is not None


def read_counts(envelope: msgspec.Raw, counts: bytes) -> ExpertCounts:
    """Read an envelope.

    Args:
        envelope: JSON.
        counts: what was cut out of it; empty where nothing was.

    Raises:
        WireError: the envelope does not follow its format.
    """
    size = len(memoryview(envelope)) + len(counts)
    if size > wire.MAX_ENVELOPE_BYTES:
        raise WireError(f"counts envelope: {size} bytes, more than the {wire.MAX_ENVELOPE_BYTES} allowed")
    try:
        fields = msgspec.json.decode(envelope)
    except UNREADABLE as error:
        raise WireError(f"counts envelope: it cannot be read: {error}") from None
    return wire.decode_counts({**fields, "counts": counts} if counts else fields)
