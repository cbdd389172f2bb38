"""What is known of one request on its way, for the log, the metrics and the admin side."""

from __future__ import annotations

import re
import time
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from coterie.core import Decision, RouteRequest
from coterie.errors import RequestError
from coterie.gateway.edge.http1 import HOP_BY_HOP, end_to_end
from coterie.gateway.edge.reply import Reply
from coterie.gateway.edge.request import Request
from coterie.gateway.legs.retry import Tries
from coterie.gateway.legs.stream import Relay

if TYPE_CHECKING:
    from coterie.gateway.legs.continuation import Followed
    from coterie.gateway.legs.handoffs import Held

REQUEST_ID = b"x-request-id"
DOMAIN = b"x-coterie-domain"
SESSION = b"x-coterie-session"

_NOT_FOR_WORKERS = HOP_BY_HOP | {
    b"accept-encoding",  # the prefill reply must be readable
    b"content-length",
    b"content-type",
    b"expect",
    b"host",
    b"x-data-parallel-rank",  # placement is the gateway's business
    DOMAIN,
    SESSION,
    REQUEST_ID,
}
_WITHOUT_KEY = _NOT_FOR_WORKERS | {b"authorization"}
_VALID_LABEL = re.compile(rb"[!-~]{1,128}")
_ids = Random()  # noqa: S311  (unique, not secret; seeded by the operating system)


class Journey(msgspec.Struct, eq=False):
    """One request on its way.

    Attributes:
        id: request id, the same on both legs and in the reply.
        request: what the client sent.
        reply: what it is sent.
        headers: header lines for the workers.
        window: what is going on: "queue" (before its turn), "prefill", "handoff" (between the legs), "decode"
            (waiting), "stream".
        prefill: name of the prefill worker; empty where there was none.
        not_split: why the decode worker is to compute the prompt, too; None where a prefill worker does.
        prefill_s: seconds that the prefill leg took.
        routed: the request as the decode policy saw it.
        decision: what the decode policy said.
        relay: the decode leg's reply, of its last attempt.
        held: KV that no decode worker has taken yet.
        late: whether its time is over.
        tries: the workers that failed it.
        followed: its stream, where another worker could go on with it.
        unresumable: why none could; None where one could, or nobody asked.
        outcome: one word: "ok", "error", "left" (the client), "cut" (the reply).
    """

    id: str
    request: Request
    reply: Reply
    headers: bytes
    window: str = "prefill"
    prefill: str = ""
    not_split: str | None = None
    prefill_s: float | None = None
    decode_start_s: float | None = None
    routed: RouteRequest | None = None
    decision: Decision | None = None
    relay: Relay | None = None
    held: Held | None = None
    late: bool = False
    tries: Tries = msgspec.field(default_factory=Tries)
    followed: Followed | None = None
    unresumable: str | None = None
    outcome: str = "ok"

    @property
    def where(self) -> str:
        """`window`, with the decode leg's two halves told apart."""
        if self.window == "decode" and self.relay is not None and self.relay.begun:
            return "stream"
        return self.window

    @property
    def first_byte_s(self) -> float | None:
        """When the first byte of the reply's body was relayed, on the loop's clock; None before."""
        if self.followed is not None and self.followed.first_byte_s is not None:
            return self.followed.first_byte_s
        return None if self.relay is None else self.relay.first_byte_s


def request_id(request: Request) -> str:
    """The client's request id, or a new one.

    Raises:
        RequestError: the client's is not one to send on.
    """
    return _label(request, REQUEST_ID, "X-Request-Id") or f"{_ids.getrandbits(128):032x}"


def domain(request: Request) -> str | None:
    """The client's domain label, if it gave one.

    Raises:
        RequestError: it is not a label.
    """
    return _label(request, DOMAIN, "X-Coterie-Domain")


def session(request: Request) -> str | None:
    """The name of the client's conversation, if it gave one.

    Raises:
        RequestError: it is not a label.
    """
    return _label(request, SESSION, "X-Coterie-Session")


def _label(request: Request, header: bytes, title: str) -> str | None:
    given = request.header(header)
    if given is None:
        return None
    if not _VALID_LABEL.fullmatch(given):
        raise RequestError(f"{title}: must be 1 to 128 visible ASCII characters", title)
    return given.decode("ascii")


def worker_headers(request: Request, id_: str, *, authorization: bool = True) -> bytes:
    """Header lines for both legs: the client's end-to-end headers and the request id.

    Args:
        request: the client's.
        id_: of the request.
        authorization: whether the client's Authorization header goes along.
    """
    lines = request.lines.get(authorization)
    if lines is None:
        drop = _NOT_FOR_WORKERS if authorization else _WITHOUT_KEY
        lines = b"".join([b"%b: %b\r\n" % header for header in end_to_end(request.headers, drop)])
        request.lines[authorization] = lines
    return b"%bx-request-id: %b\r\n" % (lines, id_.encode("ascii"))


class DecisionLog:
    """The last decode decisions, oldest first; neither counts nor content."""

    def __init__(self, keep: int) -> None:
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=keep)

    def add(self, journey: Journey, request: RouteRequest, decision: Decision) -> None:
        """Keep a decision."""
        path, counted = journey.request.path, request.counts is not None
        tokens = request.prompt_tokens, request.output_tokens
        self._entries.append((time.time(), journey.id, path, journey.prefill, decision, *tokens, counted))

    def entries(self) -> list[dict[str, Any]]:
        """JSON-ready decisions."""
        return [_entry(*entry) for entry in self._entries]


def _entry(
    time_s: float, id_: str, path: str, prefill: str, decision: Decision, prompt: int, output: int, counts: bool
) -> dict[str, Any]:
    return {
        "time": time_s,
        "id": id_,
        "path": path,
        "prefill": prefill or None,
        "decode": decision.worker,
        "reason": decision.reason,
        "detail": decision.detail or None,
        "scores": dict(decision.scores),
        "candidates": decision.candidates,
        "passed_over": dict(decision.passed_over),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "counts": counts,
    }
