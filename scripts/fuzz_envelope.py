"""Feeds mutated prefill replies and counts envelopes to the gateway's readers.

    python scripts/fuzz_envelope.py [--minutes 10] [--seed 1]

A worker's reply is bytes from elsewhere: whatever they are, reading them gives a value, or an `EngineError` or
`WireError`, in bounded time and memory.  The first reply that does otherwise is printed, and ends the run.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from coterie import wire
from coterie.core import ExpertCounts, ModelGeometry
from coterie.engines.base import Fields
from coterie.engines.vllm_nixl import VllmNixl
from coterie.errors import EngineError, WireError

SLOWEST_S = 1.0
"""The longest that one reply may take; the largest one here has some 100 KB."""

MEMORY_MIB = 256
"""How much memory the run may take beyond what it began with."""

LONGEST_MESSAGE = 2000
"""Characters of an error; more would be the worker's bytes in logs."""

_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 255, 65536, 2**31, 2**32, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, "", "x", "0", "<u8",
    "|O", "<u2", "|u1", "AAAA", "====", "\x00", "\ud800", "x" * 5000, [], [[]], [0] * 1000, {}, {"v": 1}, {"": None},
)  # fmt: skip
_TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b",",
    b":",
    b"null",
    b"NaN",
    b"-",
    b"1e999",
    b"\xff",
    b"\x00",
)
_DEEP = 5000


def good_reply(rng: random.Random) -> dict[str, Any]:
    """A reply as a healthy prefill server sends it, of a random small model."""
    geometry = ModelGeometry(rng.randint(1, 48), experts := rng.randint(1, 128), rng.randint(1, min(8, experts)))
    tokens = rng.choice((0, 1, 7, 300, 70000))
    counts = np.zeros((geometry.layers, geometry.experts), np.uint32)
    counts[:, : geometry.top_k] = tokens
    envelope = wire.encode_counts(ExpertCounts(geometry, counts, tokens, tokens))
    params = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "e",
        wire.PROMPT_KEY: envelope,
    }
    return {"id": "p", "choices": [], "usage": {"prompt_tokens": tokens}, "kv_transfer_params": params}


# --- mutations of the document -------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inside for place in ((value, key), *_places(item))]


def _replace(rng: random.Random, reply: Any) -> None:
    container, key = rng.choice(_places(reply))
    container[key] = copy.deepcopy(rng.choice(_ODD))


def _remove(rng: random.Random, reply: Any) -> None:
    container, key = rng.choice(_places(reply))
    del container[key]


def _add(rng: random.Random, reply: Any) -> None:
    containers = [place for place, _ in _places(reply) if isinstance(place, dict)]
    name = rng.choice(("coterie", "v", "counts", "kv_transfer_params", "\ud800", "new"))
    rng.choice(containers)[name] = copy.deepcopy(rng.choice(_ODD))


def _lie(rng: random.Random, reply: Any) -> None:
    """Sizes that are whole numbers but not those of the payload, which may be made to fit them."""
    envelope = reply["kv_transfer_params"][wire.PROMPT_KEY]
    name = rng.choice(("layers", "experts", "top_k", "tokens", "covered"))
    envelope[name] = rng.choice((0, 1, 2, 255, 65535, 2**31 - 1, 2**40, 2**62))
    cells = (
        envelope["layers"] * envelope["experts"] if type(envelope["layers"]) is type(envelope["experts"]) is int else 0
    )
    if rng.random() < 0.5 and 0 < cells < 20000:
        size = cells * int(envelope["dtype"][-1])
        envelope["counts"] = base64.b64encode(rng.randbytes(size)).decode()


_DOCUMENT: tuple[Callable[[random.Random, Any], None], ...] = (_replace, _replace, _remove, _add, _lie)


# --- mutations of the bytes ----------------------------------------------------------------------------


def mutate_bytes(rng: random.Random, data: bytes, tokens: tuple[bytes, ...]) -> bytes:
    """One random change: a byte, a piece taken out, doubled or cut off, or a token put in."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 8, 100)))
    return rng.choice(
        (
            data[:at] + rng.randbytes(1) + data[at + 1 :],
            data[:at] + data[end:],
            data[:end] + data[at:],
            data[:at],
            data[:at] + rng.choice(tokens) + data[at:],
            data[:at] + rng.choice(tokens) * rng.choice((2, 100, _DEEP)) + data[at:],
        )
    )


def bad_reply(rng: random.Random) -> bytes:
    """The bytes of a reply that was mutated as a document, as bytes, or both."""
    reply = good_reply(rng)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        try:
            rng.choice(_DOCUMENT)(rng, reply)
        except (LookupError, TypeError, ValueError):  # there is nothing left to mutate that way
            break
    data = json.dumps(reply).encode("ascii")
    for _ in range(rng.choice((0, 0, 1, 3))):
        data = mutate_bytes(rng, data, _TOKENS)
    return data


# --- reading -------------------------------------------------------------------------------------------


def read(reply: bytes) -> str:
    """Read a reply as the gateway does; how that ended.  What is raised beyond that is a finding."""
    engine = VllmNixl()
    try:
        handoff = engine.handoff(reply)
        counts = engine.counts(handoff)
    except (EngineError, WireError) as error:
        if len(str(error)) > LONGEST_MESSAGE:
            raise AssertionError("the message holds what was sent") from error
        return type(error).__name__
    call = engine.probe("tiny")
    for body in (engine.decode_body(call, handoff), engine.release_body(call, handoff)):
        msgspec.json.decode(body, type=Fields)  # opaque values pass unread, so no more is promised of them
    return "no counts" if counts is None else "counts"


def fuzz(rng: random.Random, goes_on: Callable[[int], bool]) -> Counter[str]:
    """Read mutated replies while `goes_on(number of replies)`; how often each end came.

    Raises:
        AssertionError: naming the reply that was not read as it should be.
    """
    ends: Counter[str] = Counter()
    least_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while goes_on(ends.total()):
        reply = bad_reply(rng)
        start_s = time.process_time()
        try:
            ends[read(reply)] += 1
        except Exception as error:
            raise AssertionError(f"{error!r} from {reply[:2000]!r} ({len(reply)} bytes)") from error
        took_s = time.process_time() - start_s
        assert took_s < SLOWEST_S, f"{took_s:.1f} s for {reply[:2000]!r} ({len(reply)} bytes)"
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - least_kib) / 1024
        assert grown < MEMORY_MIB, f"{grown:.0f} MiB more after {reply[:2000]!r} ({len(reply)} bytes)"
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    try:
        ends = fuzz(random.Random(options.seed), lambda _: time.monotonic() < end_s)
    except AssertionError as error:
        sys.exit(f"found: {error}")
    print(f"{ends.total()} replies: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))


if __name__ == "__main__":
    main()
