"""What the admin side takes and gives, as types: read and written by them, and described by them in its OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from coterie.core import Reading, Role
from coterie.gateway.fleet.breaker import State as BreakerState
from coterie.gateway.fleet.workers import Transfer

State = Literal["available", "unavailable", "draining", "drained", "leaving", "gone"]


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """A worker to be added."""

    role: Role
    url: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            max_length=2048,
            description="http://HOST:PORT[/prefix]",
            extra_json_schema={"pattern": r"^[Hh][Tt][Tt][Pp][Ss]?://[!-\"$-.0->A-~]+(/[!-\"$->@-~]*)?$"},
        ),
    ]


class WorkerRow(msgspec.Struct):
    """A worker as it is now."""

    name: Annotated[str, msgspec.Meta(description="Its name for life; a worker at another URL never has it.")]
    role: Role
    url: str
    state: Annotated[
        State,
        msgspec.Meta(
            description="available: it is sent requests. unavailable: see `problem`. draining: it is sent none, and "
            "has some. drained: it has none left. leaving: it was removed, and "
            "is forgotten when its last is over. gone: it was forgotten, which is told by who waited for it."
        ),
    ]
    available: bool
    problem: str | None
    breaker: Annotated[
        BreakerState, msgspec.Meta(description="open: the worker failed requests, and gets none for a while.")
    ]
    requests: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    transfer: Transfer | None
    reading: Reading | None
    connections: Annotated[int, msgspec.Meta(ge=0)]


class Workers(msgspec.Struct):
    """All workers: in the order of the configuration, prefill workers first; in each role those that leave last."""

    workers: list[WorkerRow]


class Health(msgspec.Struct):
    """Whether a worker of each role is available."""

    status: Literal["ok", "unavailable"]


class Decisions(msgspec.Struct):
    """The last decode decisions, oldest first."""

    decisions: list[dict[str, Any]]


class PolicyRow(msgspec.Struct):
    """How the workers of a role are chosen."""

    role: Role
    name: str | None
    figures: dict[str, float]


class Policies(msgspec.Struct):
    """The policies in use."""

    policies: list[PolicyRow]


class PeerView(msgspec.Struct):
    """What was last heard of another gateway."""

    identity: str
    heard_ago_s: Annotated[float, msgspec.Meta(description="Since its last message came, by this host's clock.", ge=0)]
    sequence: int
    requests: Annotated[int, msgspec.Meta(ge=0)]
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    unknown_workers: Annotated[int, msgspec.Meta(description="Of its workers, those that are none here.", ge=0)]


class PeerRow(msgspec.Struct):
    """A peer of the configuration."""

    name: str
    url: str
    identity: Annotated[
        str | None, msgspec.Meta(description="Once it answered; this gateway's own if the URL leads here.")
    ]
    problem: Annotated[str | None, msgspec.Meta(description="Why it does not take what this gateway says.")]
    told_ago_s: Annotated[float | None, msgspec.Meta(description="Since it last took a message.")]
    view: Annotated[PeerView | None, msgspec.Meta(description="What it said; null if nothing of late.")]


class Peers(msgspec.Struct):
    """The exchange with other gateways."""

    identity: Annotated[str, msgspec.Meta(description="Of this gateway, from start to end.")]
    peers: list[PeerRow]
    others: Annotated[list[PeerView], msgspec.Meta(description="Gateways that are heard of and are none of these.")]


class Effective(msgspec.Struct):
    """Beside all settings: which configuration they are of, and what else is known of workers."""

    generation: Annotated[int, msgspec.Meta(description="Changes of it since the start, and one; 0 before.", ge=0)]
    changed_s: Annotated[float, msgspec.Meta(description="Unix time at which it took effect; 0 before.")]
    urls: Annotated[dict[str, str], msgspec.Meta(description="Of all workers that there ever were, by name.")]
    drained: Annotated[list[str], msgspec.Meta(description="Names of the workers that are sent nothing.")]


class Reloaded(msgspec.Struct):
    """What a reload changed."""

    generation: Annotated[int, msgspec.Meta(description="Number of the configuration now in effect.", ge=1)]
    settings: Annotated[list[str], msgspec.Meta(description="Settings that are other than before.")]
    added: Annotated[list[str], msgspec.Meta(description="Workers that came.")]
    removed: Annotated[list[str], msgspec.Meta(description="Workers that are leaving.")]
    policies: Annotated[list[Role], msgspec.Meta(description="Roles whose policy was made anew.")]


class ErrorDetail(msgspec.Struct):
    """What went wrong, and what to do about it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every reply that is an error."""

    error: ErrorDetail
