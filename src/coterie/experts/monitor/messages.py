"""What servers, clients and `coterie experts status` say to the monitor, and what it says: JSON over HTTP.

    POST /register    Register              Welcome, or 409 with Problem
    POST /heartbeat   Pulse                 Welcome, or 404: register again
    POST /leave       Leave                 Welcome, or 404
    POST /report      Report                Welcome, or 404
    GET  /members     ?run=RUN&after=EPOCH  a line for each change, for as long as both sides live; see `view`
    GET  /status      Status
    GET  /placement   Suggestion, or 409 with Problem
    GET  /metrics     for Prometheus
    GET  /health      200

`Register`, `Leave` and `Report` are the events of `membership`.
"""

from __future__ import annotations

import msgspec

from coterie.experts.members import Held, Phase, State

MAX_BODY_BYTES = 4 << 20
"""Of a request; a heartbeat has one number for each expert of each layer."""
MAX_LINE_BYTES = 64 << 20
"""Of a line of `/members`; a snapshot has the experts of all servers."""
BEAT_S = 1.0
"""Silence on `/members` after which the monitor says that it lives."""


class Load(msgspec.Struct, frozen=True):
    """What a server has done since it started.

    Attributes:
        tokens: pairs of token and expert, for each expert in the order of the server's `held`.
        requests: that it computed.
        batches: in which it computed them.
        queue: requests that wait or are computed now.
        memory_bytes: of the process.
    """

    tokens: tuple[tuple[int, ...], ...]
    requests: int = 0
    batches: int = 0
    queue: int = 0
    memory_bytes: int = 0


class Pulse(msgspec.Struct, frozen=True):
    """A heartbeat."""

    id: str
    phase: Phase
    load: Load | None = None


class Welcome(msgspec.Struct, frozen=True):
    """The monitor knows the server.

    Attributes:
        epoch: number of the last change.
        since: epoch since when the server has its experts; it refuses requests of tables that are older.
        needed: whether it has experts that no other serving server has.
        heartbeat_s: when to be heard of again.
    """

    epoch: int
    since: int
    needed: bool
    heartbeat_s: float


class Problem(msgspec.Struct, frozen=True):
    """Why not."""

    problem: str


class ServerRow(msgspec.Struct, frozen=True):
    """A server, and how it is doing.

    Attributes:
        state_s: how long it has been in this state.
        silent_s: how long nothing was heard of it.
        held: expert replicas that it has, over all layers.
        pairs_per_s: pairs of token and expert that it computes in a second, of late.
    """

    id: str
    name: str
    state: State
    reason: str
    url: str
    address: str
    since: int
    state_s: float
    silent_s: float
    held: int
    pairs_per_s: float
    requests: int
    batches: int
    queue: int
    memory_bytes: int


class Coverage(msgspec.Struct, frozen=True):
    """How well the model's experts are covered.

    Attributes:
        model: its name; empty while there is no server.
        fingerprint: what its experts are known by.
        replicas: how many experts, over all layers, are on so many servers that serve.
        missing: how many experts, over all layers, no server has which serves, drains or is suspect.
        first_missing: layer and number of the first of them; None if there is none.
        imbalance: load of the busiest server over that of the mean server, mean over layers by load; None without load.
    """

    model: str
    fingerprint: str
    layers: int
    experts: int
    replicas: dict[int, int]
    missing: int
    first_missing: tuple[int, int] | None
    imbalance: float | None


class Status(msgspec.Struct, frozen=True):
    """All that the monitor knows.

    Attributes:
        run: the monitor's process.
        epoch: number of the last change.
        settled: whether every server that lives has registered with it.
        up_s: how long it has been up.
        followers: clients that are told of changes.
    """

    run: str
    epoch: int
    settled: bool
    up_s: float
    followers: int
    servers: list[ServerRow]
    coverage: Coverage


class Move(msgspec.Struct, frozen=True):
    """Experts that one server has and another one would need.

    Attributes:
        source: id of a server that has them, one that would give them up where there is any; None if no server that
            serves has them.
        target: id of the server that would need them.
        experts: of each layer.
    """

    source: str | None
    target: str
    experts: Held


class Suggestion(msgspec.Struct, frozen=True):
    """Where the experts would be, were the serving servers filled anew by the load of late; nobody moves them.

    Attributes:
        imbalance: as in `Coverage`, now.
        suggested: what it would be.
        held: by server's id, the experts of each layer.
        copies: how many experts servers would have to be given, over all layers and servers.
        moves: which, and by whom.
    """

    imbalance: float
    suggested: float
    held: dict[str, Held]
    copies: int
    moves: list[Move]
