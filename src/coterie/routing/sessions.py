"""Conversations go on where their last turn was decoded, as long as load allows."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core import Decision, RouteRequest, WorkerState
from coterie.routing.bound import load_bound

REASON = "session"


def same_worker(request: RouteRequest, workers: Sequence[WorkerState]) -> Decision | None:
    """The worker that decoded the conversation's last turn, if it may be given the next.

    A decode worker with prefix caching keeps the KV of the prompt that it pulled and of the output that it made for as
    long as it has room.  The next turn's prompt begins with both, and only what is not there is pulled, with vLLM's
    NIXL connector and the embedded engine alike.  That shortens the handoff, and with it the time to first token;
    decode steps take as long as elsewhere.

    None, and so the policy's choice, where the request continues no known conversation, or its worker is not among
    those to choose from, or holds more requests than `load_bound` allows.

    Args:
        request: to be routed.
        workers: those to choose from, at least one.
    """
    if request.holder is None:
        return None
    holder = next((worker for worker in workers if worker.name == request.holder), None)
    if holder is None or holder.requests > load_bound(workers):
        return None
    return Decision(holder.name, REASON)
