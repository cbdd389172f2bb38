"""Expert servers as monitor and clients see them: who has which experts, and whether to send them anything."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from coterie.core import MAX_EXPERTS, MAX_LAYERS
from coterie.errors import InputError
from coterie.placement import Placement

Phase = Literal["joining", "serving", "draining"]
"""What a server says of itself: not ready yet, ready, about to leave."""
State = Literal["joining", "serving", "draining", "suspect", "dead"]
"""What is thought of it: its phase while it is heard of; see `membership`."""
Held = tuple[tuple[int, ...], ...]
"""For each MoE layer, the experts that a server has, in ascending order."""

SHORT = 12
"""Digits of a fingerprint that people are shown."""
_ASKED: tuple[State, ...] = ("serving", "draining", "suspect")
_MAX_TEXT = 1024
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Server:
    """What an expert server says of itself.

    Attributes:
        id: made at random when its process starts, so that no two are taken for each other.
        name: for people; a server that is started again may have the same.
        model: name of the checkpoint, for people.
        fingerprint: what its experts are known by, see `modeling.expert_tensors`; servers of one monitor have the same.
        url: its HTTP side.
        address: where clients hand it requests: the path of its shared memory.
        tokens: the most that a request to it can carry.
        experts: experts E of each layer of the model.
        held: those that it has; `[L]` tuples, which may be empty.
        since: membership epoch since when it has them; 0 if no monitor has said so yet.

    Raises:
        InputError: a text is empty or too long, the fingerprint is none, or the experts are not ascending or not from
            0 to E - 1.
    """

    id: str
    name: str
    model: str
    fingerprint: str
    url: str
    address: str
    tokens: int
    experts: int
    held: Held
    since: int = 0

    def __post_init__(self) -> None:
        for field in ("id", "name", "model", "url", "address"):
            text = getattr(self, field)
            if not (0 < len(text) <= _MAX_TEXT and text.isprintable()):
                raise InputError(f"expert server: {field} {text[:80]!r}; need 1 to {_MAX_TEXT} printable characters")
        if not _FINGERPRINT.fullmatch(self.fingerprint):
            raise InputError(f"expert server {self.name}: fingerprint {self.fingerprint[:40]!r}; need 32 hex digits")
        if not 1 <= self.experts <= MAX_EXPERTS or not 1 <= len(self.held) <= MAX_LAYERS:
            raise InputError(
                f"expert server {self.name}: {len(self.held)} layers of {self.experts} experts; "
                f"need 1 to {MAX_LAYERS} of 1 to {MAX_EXPERTS}"
            )
        if self.tokens < 1 or self.since < 0:
            raise InputError(
                f"expert server {self.name}: {self.tokens} tokens since {self.since}; need 1, and 0, or more"
            )
        for layer, ids in enumerate(self.held):
            if ids and (ids[0] < 0 or ids[-1] >= self.experts or any(a >= b for a, b in pairwise(ids))):
                raise InputError(
                    f"expert server {self.name}: experts of layer {layer} must ascend, and be below {self.experts}"
                )

    @property
    def kind(self) -> tuple[str, int, int]:
        """What servers of one model have in common."""
        return self.fingerprint, len(self.held), self.experts

    @property
    def serves(self) -> str:
        """Its model, for people."""
        layers = f"{len(self.held)} layers of {self.experts} experts"
        return f"{self.model} ({layers}, fingerprint {self.fingerprint[:SHORT]})"


@dataclass(frozen=True, slots=True)
class Member:
    """A server, and what is thought of it.

    Attributes:
        server: what it said of itself.
        state: see `membership`.
        reason: why it is suspect or dead; empty otherwise.
    """

    server: Server
    state: State
    reason: str = ""


def covers(owners: Iterable[Member], server: Server) -> bool:
    """Whether each expert of a server is held by one of the owners that serve, too."""
    serving = [owner.server.held for owner in owners if owner.state == "serving" and owner.server.kind == server.kind]
    return all(not set(ids).difference(*(held[layer] for held in serving)) for layer, ids in enumerate(server.held))


def best_owners(members: Sequence[Member]) -> list[list[tuple[Server, ...]]]:
    """Whom to ask for each expert: those that serve; where there is none those that drain, and at last suspects.

    Args:
        members: servers of one model; at least one.

    Returns:
        `[L][E]` servers, in the order of the members.
    """
    owners: list[list[dict[State, list[Server]]]] = [
        [{} for _ in range(members[0].server.experts)] for _ in members[0].server.held
    ]
    for member in members:
        for layer, experts in enumerate(member.server.held):
            for expert in experts:
                owners[layer][expert].setdefault(member.state, []).append(member.server)
    return [[_best(by_state) for by_state in layer] for layer in owners]


def _best(owners: Mapping[State, Sequence[Server]]) -> tuple[Server, ...]:
    return tuple(next((owners[state] for state in _ASKED if state in owners), ()))


def lacking(owners: Sequence[Sequence[Collection[object]]]) -> list[tuple[int, int]]:
    """Layer and number of each expert that has no owner, of `[L][E]` owners."""
    return [(layer, expert) for layer, experts in enumerate(owners) for expert, some in enumerate(experts) if not some]


def placed_experts(placement: Placement, rank: int) -> Held:
    """The experts that a placement gives to a rank.

    Raises:
        InputError: there is no such rank.
    """
    if not 0 <= rank < placement.ranks:
        raise InputError(f"placement: rank {rank} of {placement.ranks}")
    return tuple(tuple(sorted(placement.held(layer, rank))) for layer in range(placement.layers))
