"""Shared memory between the worker that sums counts and the scheduler that returns them.

vLLM asks for a finished request's `kv_transfer_params` before it hands over what the workers reported
for that step, so sums travel through a file in `/dev/shm` of our own.  The worker writes a sum before
it sends its step's output, and the scheduler reads it after receiving that output.

Each slot belongs to one request at a time and has three parts: the prompt's sum, and two sums of the
whole request that alternate, so that a step still in flight never overwrites the sum of the step
before it.  Two pages alternate in the same way: each takes the expert ids of single tokens of one step.
A sum or page carries the ticket of its job: what was reused cannot be mistaken for another request's.
The file is unlinked as soon as the worker has mapped it, so a killed engine leaves nothing.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie import shm
from coterie.core import ModelGeometry
from coterie.errors import UnsupportedError
from coterie.shm import SharedFile
from coterie.wire import Ids, smallest_dtype

PREFIX = "coterie-counts-"
PARTS = 3
PROMPT_PART = 0
PAGES = 2
_MAGIC = 0x636F7465726965  # "coterie"
_HEADER = 8  # int64 words: magic, layers as mapped by the worker, then spare


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the shared file.

    Attributes:
        slots: requests whose sums may be kept at once.
        geometry: experts and top-k; `layers` is an upper bound: dense layers are not written.
        page_tokens: tokens whose ids one page holds, the most that a step may have.
    """

    slots: int
    geometry: ModelGeometry
    page_tokens: int

    @property
    def sum_words(self) -> int:
        """Counts of one sum, `layers * experts`."""
        return self.geometry.layers * self.geometry.experts

    @property
    def page_words(self) -> int:
        """Ids of one page."""
        return self.page_tokens * self.geometry.layers * self.geometry.top_k

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """Of the ids on a page."""
        return smallest_dtype(self.geometry.experts - 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        sums = self.slots * PARTS * (16 + 4 * self.sum_words)
        return 8 * _HEADER + sums + PAGES * (8 + self.id_dtype.itemsize * self.page_words)


class Slots:
    """Fixed slots of counts, `[slots, PARTS, layers, experts]` int32, each with a ticket and a token count.

    Beside them pages of ids, `[PAGES, page_tokens, layers, top_k]`, each with a ticket.

    Args:
        buffer: memory that both sides map.
        layout: its sizes.
    """

    def __init__(self, buffer: mmap.mmap, layout: Layout) -> None:
        self._layout = layout
        words = np.frombuffer(buffer, np.int64, _HEADER + layout.slots * PARTS * 2 + PAGES)
        self._header = words[:_HEADER]
        self._page_tickets = words[-PAGES:]
        self._heads = words[_HEADER:-PAGES].reshape(layout.slots, PARTS, 2)
        counts = np.frombuffer(buffer, np.int32, layout.slots * PARTS * layout.sum_words, words.nbytes)
        self._counts = counts.reshape(layout.slots, PARTS, layout.sum_words)
        pages = np.frombuffer(buffer, layout.id_dtype, PAGES * layout.page_words, words.nbytes + counts.nbytes)
        self._pages = pages.reshape(PAGES, layout.page_words)
        self._file: SharedFile | None = None

    @classmethod
    def create(cls, layout: Layout, folder: str = shm.FOLDER) -> tuple[Slots, Path]:
        """Create the file, only readable by this user, with its memory reserved, and locked until `unlink`.

        Raises:
            UnsupportedError: shared memory is too small or not there.
        """
        file = SharedFile.create(PREFIX, layout.nbytes, folder)
        table = cls(file.memory, layout)
        table._header[0] = _MAGIC
        table._file = file
        return table, file.path

    def unlink(self) -> None:
        """Scheduler: remove the file; what is mapped stays."""
        if self._file is not None:
            self._file.unlink()
            self._file = None

    @classmethod
    def open(cls, path: str, layout: Layout) -> Slots:
        """Map a file made by `create`.

        Raises:
            UnsupportedError: the file is gone (scheduler and worker on different hosts) or not ours.
        """
        try:
            with open(path, "r+b") as file:
                buffer = mmap.mmap(file.fileno(), layout.nbytes)
        except (OSError, ValueError) as error:
            raise UnsupportedError(
                f"the worker cannot map the scheduler's shared memory {path} ({error}); "
                "scheduler and worker must run on one host"
            ) from error
        table = cls(buffer, layout)
        if int(table._header[0]) != _MAGIC:
            raise UnsupportedError(f"{path} is not coterie's shared memory")
        return table

    def announce(self, layers: int) -> None:
        """Worker: say how many MoE layers a sum has, which also says that the file is mapped."""
        self._header[1] = layers

    @property
    def announced_layers(self) -> int:
        """MoE layers of a sum; 0 before the worker has mapped the file."""
        return int(self._header[1])

    def write(self, slot: int, part: int, ticket: int, tokens: int, counts: npt.NDArray[np.int32]) -> None:
        """Worker: store a sum `[L, E]` over `tokens` counted tokens."""
        self._counts[slot, part, : counts.size] = counts.reshape(-1)
        self._heads[slot, part] = (ticket, tokens)

    def read(self, slot: int, part: int, ticket: int) -> tuple[int, npt.NDArray[np.int32]] | None:
        """Scheduler: counted tokens and a copy of the sum, or None where the worker did not write this ticket."""
        found, tokens = (int(word) for word in self._heads[slot, part])
        if found != ticket:
            return None
        shape = (self.announced_layers, self._layout.geometry.experts)
        return tokens, self._counts[slot, part, : math.prod(shape)].reshape(shape).copy()

    def write_ids(self, page: int, ticket: int, ids: Ids) -> None:
        """Worker: store the ids `[tokens, L, top_k]` of some tokens of a step."""
        self._pages[page, : ids.size] = ids.reshape(-1)
        self._page_tickets[page] = ticket

    def read_ids(self, page: int, ticket: int, first: int, tokens: int) -> Ids | None:
        """Scheduler: a copy of `tokens` rows from row `first` on, or None where this ticket was not written."""
        if int(self._page_tickets[page]) != ticket:
            return None
        row = (self.announced_layers, self._layout.geometry.top_k)
        words = math.prod(row)
        return self._pages[page, first * words : (first + tokens) * words].reshape(tokens, *row).copy()
