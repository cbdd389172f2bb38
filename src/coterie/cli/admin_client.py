"""What the commands that change a running gateway share: its admin side, asked over HTTP."""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import click
import httpx
import msgspec

from coterie.decoding import UNREADABLE
from coterie.errors import ConfigError, EngineError
from coterie.gateway.admin.api import Error

_TIMEOUT_S = 120.0  # a reload reads a trace, and makes a policy of it
_T = TypeVar("_T")

_admin_option = click.option(
    "--admin",
    "url",
    metavar="URL",
    default="http://127.0.0.1:8001",
    show_default=True,
    help="The gateway's admin side.",
)
_key_option = click.option(
    "--admin-key-env", "key_env", metavar="NAME", help="Environment variable that holds the admin side's key."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the reply as JSON, for programs.")


class Admin:
    """The admin side of one gateway.

    Args:
        url: where it is.
        key: what it wants to be shown; None for nothing.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def ask(self, method: str, *path: str, reply: type[_T], body: Any = None) -> _T:
        """Send a request; return what it was answered.

        Args:
            method: HTTP method.
            path: parts of the path.
            reply: type of the answer.
            body: sent as JSON; None for none.

        Raises:
            EngineError: it cannot be reached, or refuses; the message is its own.
        """
        target = "/".join([self._url, *(quote(part, safe="") for part in path)])
        try:
            # httpx would take a proxy of the environment even for this machine, and not the system's authorities
            with httpx.Client(
                timeout=_TIMEOUT_S, trust_env=False, verify=ssl.create_default_context(), headers=self._headers
            ) as client:
                answer = client.request(method, target, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(
                f"the admin side at {self._url} cannot be reached: {error}; is the gateway running, and is this the "
                "address that it prints after `admin`?"
            ) from None
        return _read(answer, reply)


def asks_admin(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the admin side: it is called with an `Admin` and `as_json` before its own."""

    @_admin_option
    @_key_option
    @_json_option
    @functools.wraps(command)
    def asking(url: str, key_env: str | None, as_json: bool, **own: Any) -> None:
        command(Admin(url, _key(key_env)), as_json, **own)

    return asking


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "")
    if not (key.isascii() and key.isprintable() and key):
        raise ConfigError(f"${variable}: must be set to the key of the admin side")
    return key


def _read(answer: httpx.Response, reply: type[_T]) -> _T:
    try:
        if answer.is_success:
            return msgspec.json.decode(answer.content, type=reply)
        refused = msgspec.json.decode(answer.content, type=Error)
    except UNREADABLE:
        raise EngineError(f"the reply ({answer.status_code}) is not a gateway's; is this its admin side?") from None
    raise EngineError(f"the gateway refuses: {refused.error.message}")


def tell(found: _T, *, as_json: bool, say: Callable[[_T], str]) -> None:
    """Print a reply: as JSON, or in words."""
    click.echo(msgspec.json.encode(found) if as_json else say(found))
