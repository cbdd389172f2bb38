"""Runs a policy's work beside its decisions: in a thread, so that no request waits for it."""

from __future__ import annotations

import asyncio

from coterie.gateway.fleet.workers import Fleet
from coterie.routing import TICK_S, Background


async def work(fleet: Fleet) -> None:
    """Ask the fleet's policy for work for ever, whichever policy it is at the time."""
    while True:
        await asyncio.sleep(TICK_S)
        if isinstance(policy := fleet.policy, Background):
            job = policy.due(fleet.ledger.states(), fleet.clock.now())
            if job is not None:
                policy.install(await asyncio.to_thread(job.run), fleet.clock.now())
