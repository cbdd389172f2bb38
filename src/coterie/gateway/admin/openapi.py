"""The admin side's OpenAPI description, made of the table that also makes its routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from coterie import __version__
from coterie.decoding import reading
from coterie.gateway.admin.api import Effective, Error
from coterie.gateway.config import FIELDS, GatewayConfig
from coterie.json_http import JSON

MAX_BODY_BYTES = 64 << 10
"""Of most operations."""

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is malformed.",
    403: "The request was made by a page of another site in somebody's browser.",
    404: "No worker has this name.",
    409: "Refused; the message says why. Nothing has changed.",
    413: "The body is too large.",
    415: "The body is not said to be what it must be.",
    503: "The gateway is still starting.",
}
_OF_CHANGES = (400, 403, 413)
"""What any request that changes something may be answered."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One thing that the admin side does.

    Attributes:
        method: HTTP method.
        path: with the worker's name as `{name}`.
        summary: in a few words.
        handler: given the request and its body, read as `body`.
        replies: what it answers, by status; str for plain text, `Effective` for the settings with their generation.
        errors: statuses of its own errors.
        body: type of its body; None for none.
        media: of its body.
        read: its body from bytes, where that is more than to decode JSON; it may raise `WireError`.
        max_bytes: of its body.
    """

    method: str
    path: str
    summary: str
    handler: Callable[[Request, Any], Awaitable[Response]]
    replies: Mapping[int, Any]
    errors: tuple[int, ...] = ()
    body: Any = None
    media: str = JSON
    read: Callable[[bytes], Any] | None = None
    max_bytes: int = MAX_BODY_BYTES

    def decode(self, body: bytes) -> Any:
        """Its body from bytes.

        Raises:
            WireError: they are none.
        """
        if self.read is not None:
            return self.read(body)
        with reading("the body"):
            return msgspec.json.decode(body, type=self.body)

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.method != "GET"


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = {
        type_: None for one in operations for type_ in (*one.replies.values(), one.body) if type_ not in (None, str)
    }
    schemas, components = msgspec.json.schema_components([*types, Error, GatewayConfig], ref_template=_REF)
    schema_of = dict(zip([*types, Error], schemas, strict=False))
    for name, field in FIELDS.items():
        components["GatewayConfig"]["properties"][name]["description"] = field.metadata["help"]
    schema_of[Effective] = {"allOf": [{"$ref": _REF.format(name=one)} for one in ("GatewayConfig", "Effective")]}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "coterie's admin side", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(one: Operation, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    errors = {*one.errors, *(_OF_CHANGES if one.changes else ()), *((415,) if one.body else ())}
    found: dict[str, Any] = {
        "operationId": one.handler.__name__,
        "summary": one.summary,
        "responses": {
            **{str(status): _reply("As asked.", type_, schema_of) for status, type_ in one.replies.items()},
            **{str(status): _reply(_ERRORS[status], Error, schema_of) for status in sorted(errors)},
        },
    }
    if "{name}" in one.path:
        found["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if one.body is not None:
        found["requestBody"] = {"required": True, "content": {one.media: {"schema": schema_of[one.body]}}}
    return found


def _reply(text: str, type_: Any, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    if type_ is str:
        return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"description": text, "content": {JSON: {"schema": schema_of[type_]}}}
