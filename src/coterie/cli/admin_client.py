"""What the commands that change a running gateway share: its admin side, asked over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote

import click
import httpx
import msgspec

from coterie.errors import EngineError
from coterie.gateway.admin_api import Error

_TIMEOUT_S = 120.0  # a reload reads a trace, and makes a policy of it
_T = TypeVar("_T")

admin_option = click.option(
    "--admin",
    "url",
    metavar="URL",
    default="http://127.0.0.1:8001",
    show_default=True,
    help="The gateway's admin side.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the reply as JSON, for programs.")


class Admin:
    """The admin side of one gateway.

    Args:
        url: where it is.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

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
            # httpx would take a proxy of the environment even for this machine
            with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
                answer = client.request(method, target, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(
                f"the admin side at {self._url} cannot be reached: {error}; is the gateway running, and is this the "
                "address that it prints after `admin`?"
            ) from None
        return _read(answer, reply)


def _read(answer: httpx.Response, reply: type[_T]) -> _T:
    try:
        if answer.is_success:
            return msgspec.json.decode(answer.content, type=reply)
        refused = msgspec.json.decode(answer.content, type=Error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise EngineError(f"the reply ({answer.status_code}) is not a gateway's; is this its admin side?") from None
    raise EngineError(f"the gateway refuses: {refused.error.message}")


def tell(found: _T, *, as_json: bool, say: Callable[[_T], str]) -> None:
    """Print a reply: as JSON, or in words."""
    click.echo(msgspec.json.encode(found) if as_json else say(found))
