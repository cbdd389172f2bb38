"""What a client is told where no worker's reply can be relayed to it as it comes."""

from __future__ import annotations

from coterie.engines.base import Answer
from coterie.engines.large import LARGE_BYTES
from coterie.errors import CoterieError, NoWorkerError, RequestError
from coterie.gateway.edge.http1 import HOP_BY_HOP, Header, RefusedError, end_to_end, retry_after
from coterie.gateway.edge.reply import Reply
from coterie.gateway.legs.journey import REQUEST_ID, Journey
from coterie.gateway.legs.upstream import Collected, UpstreamError

_replaced = HOP_BY_HOP | {b"content-length", REQUEST_ID}
_rewritten = _replaced | {b"content-type"}


def identity(id_: str) -> list[Header]:
    """The headers that tell a client its request's id."""
    return [(REQUEST_ID, id_.encode("ascii"))]


def pass_through(reply: Reply, collected: Collected, id_: str) -> None:
    """Answer with a worker's own error: status, headers and body, unless the body is far larger than errors are."""
    assert collected.head is not None
    if collected.is_large:
        message = f"a worker answered {collected.status} with more than {LARGE_BYTES} bytes"
        reply.send_error(502, message, "upstream_error", identity(id_), code="bad_gateway")
        return
    headers = end_to_end(collected.head.headers, _replaced)
    reply.send(collected.status, [*headers, *identity(id_)], collected.body())


def rewritten(reply: Reply, collected: Collected, answer: Answer, id_: str) -> None:
    """Answer with what was made of a worker's reply, under its headers."""
    assert collected.head is not None
    headers = [(b"content-type", answer.content_type), *end_to_end(collected.head.headers, _rewritten)]
    reply.send(200, [*headers, *identity(id_)], answer.body)


def answer_error(journey: Journey, error: CoterieError) -> None:
    """Tell the client what went wrong, as far as the reply still can."""
    if journey.reply.status:
        assert journey.relay is not None
        journey.outcome = "error" if journey.relay.fail(str(error)) else "cut"
        return
    journey.outcome = "error"
    reply, headers = journey.reply, identity(journey.id)
    if isinstance(error, RefusedError):
        reply.refuse(error, headers)
    elif isinstance(error, RequestError):
        reply.send_error(400, str(error), "invalid_request_error", headers, param=error.param)
    elif isinstance(error, NoWorkerError):
        headers.append(retry_after(error.retry_after_s))
        reply.send_error(503, str(error), "unavailable_error", headers, code="no_worker")
    elif isinstance(error, UpstreamError) and error.kind == "timeout":
        reply.send_error(504, str(error), "upstream_error", headers, code="timeout")
    else:
        reply.send_error(502, str(error), "upstream_error", headers, code="bad_gateway")
