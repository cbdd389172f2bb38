"""Which servers hold which experts, as a client knows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coterie.core import ModelGeometry
from coterie.errors import InputError

Owners = tuple["Server", ...]
"""Servers that hold an expert; none where all of them are gone."""


@dataclass(frozen=True, slots=True, order=True)
class Server:
    """One life of an expert server: one that was started anew has another address.

    Attributes:
        name: what people call it.
        address: path of its shared memory.
        url: its HTTP side, which says by what else it can be reached; empty if nobody has said so.
    """

    name: str
    address: str
    url: str = ""

    def __hash__(self) -> int:
        return hash(self.address)  # of a text, which remembers it: servers are looked up at every request


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTable:
    """Who holds what, since a membership epoch.

    Attributes:
        epoch: sent with each request; a server whose experts changed later refuses it.
        tokens: most tokens that a request to any of the servers can carry.
        owners: `[L][E]` servers of each expert of each layer.
    """

    epoch: int
    tokens: int
    owners: tuple[tuple[Owners, ...], ...]

    @classmethod
    def of(
        cls, geometry: ModelGeometry, held: Mapping[Server, Sequence[Collection[int]]], *, epoch: int, tokens: int
    ) -> RoutingTable:
        """Make a table of what each server holds.

        Args:
            geometry: layers and experts of the model.
            held: `[L]` experts of each layer, by server.
            epoch: since when that is so.
            tokens: most tokens of a request.

        Raises:
            InputError: a server holds an expert, or a layer, that the model does not have, or takes no tokens.
        """
        if tokens < 1:
            raise InputError(f"routing table: a request carries {tokens} tokens; need one at least")
        owners: list[list[list[Server]]] = [[[] for _ in range(geometry.experts)] for _ in range(geometry.layers)]
        for server in sorted(held):
            if len(held[server]) != geometry.layers:
                raise InputError(f"{server.name} has experts of {len(held[server])} layers; need {geometry.layers}")
            for layer, experts in enumerate(held[server]):
                for expert in experts:
                    if not 0 <= expert < geometry.experts:
                        raise InputError(f"{server.name}, layer {layer}: expert {expert} of {geometry.experts}")
                    owners[layer][expert].append(server)
        return cls(epoch, tokens, tuple(tuple(map(tuple, layer)) for layer in owners))

    def servers(self) -> frozenset[Server]:
        """All that hold an expert."""
        return frozenset(server for layer in self.owners for owners in layer for server in owners)


class Directory(Protocol):
    """Where routing tables come from."""

    def table(self) -> RoutingTable:
        """The newest one that is known; asked for at every call, so it must not wait."""
        ...

    def await_newer(self, table: RoutingTable, until_s: float) -> None:
        """Look for a newer one than this, and return when it is there, or at this moment of the client's clock."""
        ...

    def doubt(self, server: Server, *, gone: bool) -> None:
        """Hear that a server does not reply, which is news to the client; must not wait.

        Args:
            server: which.
            gone: whether it is certain that its process has ended.
        """
        ...
