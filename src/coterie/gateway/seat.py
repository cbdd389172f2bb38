"""A process's place among those that are one gateway together."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.core import Role
from coterie.routing import Others
from coterie.routing.shared_load import Board

BOARD_PREFIX = "coterie-gateway-"


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """One of several processes of a gateway.

    Attributes:
        process: its number, from 0; also its row of the board.
        board: where they show each other what they hold.
    """

    process: int
    board: Board

    @classmethod
    def take(cls, process: int, path: str, rows: int, sessions: int) -> Seat:
        """The seat of this process, by the board's path, rows and sessions.

        Raises:
            OSError: the board is gone, and with it the process that made it.
        """
        with Path(path).open("r+b") as file:
            return cls(process, Board(mmap.mmap(file.fileno(), 0), rows, sessions))

    def others(self, role: Role, identity: Callable[[str], str]) -> Others:
        """What the other processes hold of the workers of a role.

        Args:
            role: of the workers.
            identity: URL of the worker of this name: processes that reload apart know workers by other names.
        """
        return self.board.row(0 if role == "prefill" else 1, self.process, identity)
