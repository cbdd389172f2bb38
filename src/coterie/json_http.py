"""What the HTTP sides of gateway, workers, expert servers and monitor have in common: bodies of JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

JSON = "application/json"


def json_reply(value: Any, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def metrics_reply(page: bytes) -> Response:
    """Metrics for Prometheus."""
    return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})


async def bounded_body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        HTTPException: 413, it is larger.
    """
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > most:
            raise HTTPException(413, f"the body is larger than {most} bytes", {"connection": "close"})
    return b"".join(parts)


def check_media(request: Request, media: str = JSON) -> None:
    """Check that a body is declared as what it should be, which a page that somebody looks at cannot do elsewhere.

    Raises:
        HTTPException: 415, it is not.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != media:
        raise HTTPException(415, f"the body must be sent as content-type: {media}")
