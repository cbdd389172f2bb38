"""A small HTTP client for one engine: bounded replies, bounded retries, the server's own words in errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import httpx
import msgspec

from coterie.errors import EngineError, InputError

_MAX_REPLY_BYTES = 256 << 20  # SGLang's int32 ids of a prompt of 100,000 tokens, 61 layers and top-8 as base64
_WAITS_S = (1.0, 2.0, 4.0, 8.0)
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
_UNREACHABLE = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)
_SAID_BYTES = 500


class EngineClient:
    """Talks to one server; a context manager.

    A server that cannot be reached, or answers 503, is asked again after 1, 2, 4 and 8 s; every other
    failure is final.  Proxies of the environment are not used: engines are near.

    Attributes:
        server: base URL.
    """

    def __init__(
        self,
        server: str,
        *,
        notice: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Check the URL.

        Args:
            server: base URL.
            notice: told of waits and their causes.
            sleep: how to wait.

        Raises:
            InputError: it is not an HTTP URL, or that of the API below it.
        """
        if not _is_http_url(server):
            raise InputError(f"server {server!r} is not a URL such as http://127.0.0.1:8000")
        if server.rstrip("/").endswith("/v1"):
            raise InputError(f"server {server!r}: leave out /v1, which is part of each request's path")
        self.server = server.rstrip("/")
        self._notice = notice
        self._sleep = sleep
        self._http = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)

    async def only_model(self) -> str:
        """Name of the model that the server serves.

        Raises:
            InputError: it serves several.
            EngineError: see `post`.
        """
        reply = await self._request("GET", "/v1/models", None)
        data = reply.get("data")
        names = [str(model.get("id")) for model in data if isinstance(model, dict)] if isinstance(data, list) else []
        if len(names) != 1:
            raise InputError(f"{self.server} serves {', '.join(names) or 'no model'}; name one with --model")
        return names[0]

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post JSON and read the JSON object that comes back.

        Raises:
            EngineError: the server cannot be reached, answers another status than 200, or no JSON object.
        """
        return await self._request("POST", path, msgspec.json.encode(body))

    async def _request(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        for wait_s in (*_WAITS_S, None):
            try:
                status, content = await self._once(method, path, body)
                problem = f"answered {status}: {_said(content)}"
            except _UNREACHABLE as error:
                status, content = None, b""
                problem = f"cannot be reached: {error or type(error).__name__}"
            except httpx.HTTPError as error:
                raise EngineError(f"{self.server}{path}: {error or type(error).__name__}") from None
            if status == 200:
                return self._object(path, content)
            if status not in (None, 503) or wait_s is None:
                break
            self._notice(f"{self.server} {problem}; next try in {wait_s:g} s")
            await self._sleep(wait_s)
        raise EngineError(f"{self.server}{path} {problem}")

    async def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} if body else {}
        async with self._http.stream(method, self.server + path, content=body, headers=headers) as response:
            content = bytearray()
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > _MAX_REPLY_BYTES:
                    raise EngineError(f"{self.server}{path} answered with more than {_MAX_REPLY_BYTES} bytes")
            return response.status_code, bytes(content)

    def _object(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(f"{self.server}{path} answered with something else than JSON: {error}") from None

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._http.aclose()


def _is_http_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def _said(content: bytes) -> str:
    """What a server says in an error reply: the message of OpenAI's error object, else the beginning of its text."""
    try:
        reply = msgspec.json.decode(content)
        return str(reply["error"]["message"])[:_SAID_BYTES]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return content[:_SAID_BYTES].decode("utf-8", "replace") or "(no text)"
