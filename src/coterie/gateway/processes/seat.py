"""A process's place among those that are one gateway together."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from coterie.core import ModelGeometry, Role
from coterie.routing import Others, Share
from coterie.routing.shared_batches import SharedBatches
from coterie.routing.shared_load import Board

BOARD_PREFIX = "coterie-gateway-"

Identity = Callable[[str], str]
"""URL of the worker of this name: processes that reload apart know workers by other names."""


class Seat:
    """One of several processes of a gateway.

    Args:
        process: its number, from 0; also its row of the board.
        board: where they show each other what they hold.
        urls: of all workers that the others ever had, by name.
        drained: names of those that are sent nothing.

    Attributes:
        process: the same.
        urls: the same.
        drained: the same.
    """

    def __init__(
        self, process: int, board: Board, urls: Mapping[str, str] | None = None, drained: Collection[str] = ()
    ) -> None:
        self.process = process
        self.urls = urls or {}
        self.drained = drained
        self._board = board
        self._batches: SharedBatches | None = None

    @classmethod
    def take(
        cls, process: int, path: str, rows: int, sessions: int, urls: Mapping[str, str], drained: Collection[str]
    ) -> Seat:
        """The seat of this process, by the board's path, rows and sessions, and what the others know of the workers.

        Raises:
            OSError: the board is gone, and with it the process that made it.
        """
        with Path(path).open("r+b") as file:
            return cls(process, Board(mmap.mmap(file.fileno(), 0), rows, sessions), urls, drained)

    def others(self, role: Role, identity: Identity) -> Others:
        """What the other processes hold of the workers of a role."""
        return self._board.row(0 if role == "prefill" else 1, self.process, identity)

    def share(self, identity: Identity) -> Share:
        """How the decode policy knows what the other processes' requests use; one policy at a time."""

        def share(groups: Sequence[str], geometry: ModelGeometry) -> SharedBatches:
            former = self._batches
            self._batches = SharedBatches(self._board.announcements, self.process, groups, geometry, identity)
            if former is not None:
                former.close()
            return self._batches

        return share

    def close(self) -> None:
        """Remove what this process alone has made."""
        if self._batches is not None:
            self._batches.close()
