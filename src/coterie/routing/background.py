"""Work of a policy beside its decisions: who runs it differs between gateway and simulator, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from coterie.core import WorkerState

TICK_S = 0.25
"""How often a policy is asked whether work is due."""


class Job(Protocol):
    """A piece of work that touches nothing but its own copy of what it needs; any thread may run it."""

    def run(self) -> Any:
        """Do it, and return the outcome; never raises."""
        ...


@runtime_checkable
class Background(Protocol):
    """A policy that has such work.

    Its driver asks `due` every `TICK_S`, runs the job that it is given, and hands the outcome to `install`; it has at
    most one job at a time.  Both calls are quick and come from the thread that decides.
    """

    def due(self, workers: Sequence[WorkerState], now_s: float) -> Job | None:
        """A job to be run now, if any.

        Args:
            workers: all of them, in the order of the targets.
            now_s: by the ledger's clock.
        """
        ...

    def install(self, outcome: Any, now_s: float) -> None:
        """Take what the last job found."""
        ...
