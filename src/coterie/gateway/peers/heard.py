"""What was heard of other gateways, put where the ledgers of this one look: on the board, as if of one more process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coterie.errors import CoterieError, InputError
from coterie.gateway.config import LEAST_MESSAGES
from coterie.gateway.peers.message import Figures, Message, figures_of
from coterie.routing import Load
from coterie.routing.shared_batches import HeardBatches, HeldBatches, Shape
from coterie.routing.shared_load import Board
from coterie.shm import FOLDER

PREFILL, DECODE = range(2)


class Own:
    """What the processes of this gateway hold together.

    Args:
        board: theirs.
        processes: how many; their rows are the first.
        folder: where files of shared memory are.
    """

    def __init__(self, board: Board, processes: int, folder: str = FOLDER) -> None:
        self._board = board
        self._processes = processes
        self._batches = HeldBatches(board.announcements, processes, folder)

    def figures(self) -> Figures:
        """All of it now."""
        batches = self._batches.take()
        return Figures(self._held(PREFILL), self._held(DECODE), self._batches.shape, batches)

    def mark(self) -> bytes:
        """Another one whenever it has changed."""
        return self._board.mark(self._processes)

    def check(self, said: Figures) -> int:
        """Whether what another gateway said can be about the same workers and model.

        Returns:
            How many of its workers are none of this gateway's; they are left alone.

        Raises:
            InputError: it cannot.
        """
        shape = self._batches.shape
        if None not in (shape, said.shape) and said.shape != shape:
            raise InputError(
                f"the peer's model has {_by(said.shape)} experts, this gateway's {_by(shape)}; peers serve one model"
            )
        ours = [self._held(role).keys() for role in (PREFILL, DECODE)]
        theirs = [said.prefill.keys(), said.decode.keys()]
        unknown = sum(len(its - our) for its, our in zip(theirs, ours, strict=True))
        if any(ours) and 0 < unknown == sum(map(len, theirs)):
            raise InputError(
                f"none of the peer's {unknown} workers is one of this gateway's; peers serve the same workers, and "
                "name them by the same URLs"
            )
        return unknown

    def _held(self, role: int) -> dict[int, Load]:
        return self._board.held(role, self._processes)


@dataclass(frozen=True, slots=True)
class View:
    """What was last heard of another gateway.

    Attributes:
        identity: which.
        sequence: number of its last message.
        heard_s: when that came, on this host's clock.
        requests: what it holds, over all workers.
        tokens: likewise.
        unknown_workers: how many of its workers this gateway does not have.
    """

    identity: str
    sequence: int
    heard_s: float
    requests: int
    tokens: int
    unknown_workers: int


class Heard:
    """The views of all other gateways.

        view of a worker = what this gateway holds + the last message of each other one that was heard of lately

    The last message is the one of the greatest number, in whatever order they come.  How long ago it came is told by
    this host's clock alone, so a message that was long on its way counts as fresh for once; the next one mends that.

    A gateway that starts again is another one, so one that keeps starting again may need more rows than there are: it
    then gets that of whoever has been silent for longest, if for so long that messages are missing.

    Args:
        own: what this gateway holds.
        identity: of this gateway; what it says itself is not taken.
        board: where to write.
        rows: that may be written, one for each other gateway.
        timeout_s: how long what was heard counts.
        folder: where files of shared memory are.

    Attributes:
        views: by identity.
    """

    def __init__(
        self, own: Own, identity: str, board: Board, rows: Iterable[int], timeout_s: float, folder: str = FOLDER
    ) -> None:
        self.views: dict[str, View] = {}
        self._own = own
        self._identity = identity
        self._board = board
        self._free = list(rows)
        self._timeout_s = timeout_s
        self._folder = folder
        self._written: dict[str, _Written] = {}

    def take(self, message: Message, now_s: float) -> bool:
        """Let a message count; return whether it does, which one that comes late does not.

        Raises:
            InputError: it is not consistent, not about the same workers or model, or of one gateway too many.
            UnsupportedError: shared memory is too small.
        """
        known = self.views.get(message.identity)
        if message.identity == self._identity or (known is not None and message.sequence <= known.sequence):
            return False
        if message.leaving:
            self.forget(message.identity)
            return True
        figures = figures_of(message)
        unknown = self._own.check(figures)
        self._write(message.identity, figures, now_s)
        loads = [*figures.prefill.values(), *figures.decode.values()]
        self.views[message.identity] = View(
            message.identity,
            message.sequence,
            now_s,
            sum(load.requests for load in loads),
            sum(load.tokens for load in loads),
            unknown,
        )
        return True

    def expire(self, now_s: float) -> list[View]:
        """Forget those of whom nothing came for too long; return them."""
        silent = [view for view in self.views.values() if now_s - view.heard_s > self._timeout_s]
        for view in silent:
            self.forget(view.identity)
        return silent

    def forget(self, identity: str) -> None:
        """Nothing that this gateway said counts any more."""
        self.views.pop(identity, None)
        if (written := self._written.pop(identity, None)) is not None:
            written.clear()
            self._free.append(written.row)

    def _write(self, identity: str, figures: Figures, now_s: float) -> None:
        if identity not in self._written:
            self._make_room(now_s)
            self._written[identity] = _Written(self._board, self._free.pop(0), self._folder)
        try:
            self._written[identity].put(figures)
        except CoterieError:
            self.forget(identity)
            raise

    def _make_room(self, now_s: float) -> None:
        if self._free:
            return
        silent = min(self.views.values(), key=lambda view: view.heard_s)
        if now_s - silent.heard_s < self._timeout_s / LEAST_MESSAGES:
            raise InputError(
                f"this gateway hears of {len(self.views)} others already; give every gateway all others by --peer"
            )
        self.forget(silent.identity)


class _Written:
    """A row of the board, and a file, that say what another gateway holds."""

    def __init__(self, board: Board, row: int, folder: str) -> None:
        self.row = row
        self._board = board
        self._folder = folder
        self._begin()

    def put(self, figures: Figures) -> None:
        loads = (figures.prefill, figures.decode)
        if not all(row.has_room(its) for row, its in zip(self._loads, loads, strict=True)):
            self.clear()  # it has had too many workers in its life
            self._begin()
        for row, its in zip(self._loads, loads, strict=True):
            row.replace(its)
        self._batches.replace(list(figures.decode), figures.shape, figures.batches)

    def clear(self) -> None:
        self._board.clear(self.row)
        self._batches.close()

    def _begin(self) -> None:
        self._loads = [self._board.writer(role, self.row) for role in (PREFILL, DECODE)]
        self._batches = HeardBatches(self._board.announcements, self.row, self._folder)


def _by(shape: Shape | None) -> str:
    return "x".join(map(str, shape or ()))
