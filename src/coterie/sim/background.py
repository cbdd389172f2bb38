"""Runs a policy's work beside its decisions, as `gateway.fleet.background` does, in simulated time."""

from __future__ import annotations

from typing import Any

from coterie.routing import TICK_S, Background, Ledger
from coterie.sim.kernel import Kernel, Priority

JOB_S = 0.5
"""Seconds from when work is due until its outcome is installed; `bench/routing.py` measures a refit."""


class BackgroundWork:
    """Asks a policy for work every `TICK_S`, as long as anything else happens.

    Args:
        kernel: runs it.
        policy: may have work.
        ledger: of the workers that it chooses from.
    """

    def __init__(self, kernel: Kernel, policy: Background, ledger: Ledger) -> None:
        self._kernel = kernel
        self._policy = policy
        self._ledger = ledger
        kernel.every(TICK_S, self._tick)

    def _tick(self) -> None:
        job = self._policy.due(self._ledger.states(), self._kernel.now())
        if job is not None:
            self._kernel.after(JOB_S, Priority.CHANGE, self._install, job.run())

    def _install(self, outcome: Any) -> None:
        self._policy.install(outcome, self._kernel.now())
