"""Looks whether decode workers fetch the KV that prefill workers keep for them.

A decode server without a KV connector ignores the handoff and computes the prompt again: every reply is right, and the
prefill workers work for nothing.  So the mode is seen, not assumed.
"""

from __future__ import annotations

import asyncio
import logging

from coterie.engines.base import Engine
from coterie.errors import EngineError
from coterie.gateway.fleet.workers import Transfer, Worker
from coterie.gateway.legs.upstream import Collected, Patience

_HEADERS = b"x-request-id: coterie-probe\r\n"
_MAX_REPLY_BYTES = 16 << 20
_LOOKS = 5
_PAUSE_S = 0.1
"""vLLM counts a step after it has sent the step's replies."""

_log = logging.getLogger("coterie.gateway")


async def look(engine: Engine, worker: Worker, patience: Patience) -> None:
    """Note how a decode worker, which has just been given a handoff, comes by KV; warn where it is not as it should be.

    Args:
        engine: the worker's dialect.
        worker: a decode worker.
        patience: for each request to it.
    """
    fetches = await _fetches(engine, worker, patience)
    worker.transfer = Transfer(fetches, await _on_lost(engine, worker, patience))
    if fetches is False:
        _log.warning(
            "%s (%s) computes prompts itself, though a prefill worker has done so: start it with --kv-transfer-config",
            worker.name,
            worker.url,
        )
    if worker.transfer.on_lost == "recompute":
        _log.warning("%s (%s) computes prompts itself whose KV it cannot fetch", worker.name, worker.url)


async def _fetches(engine: Engine, worker: Worker, patience: Patience) -> bool | None:
    try:
        for _ in range(_LOOKS):
            if engine.fetched_tokens(await _get(worker, engine.metrics_path, patience)) > 0:
                return True
            await asyncio.sleep(_PAUSE_S)
    except EngineError as error:
        _log.warning("%s (%s): whether it fetches KV cannot be seen: %s", worker.name, worker.url, error)
        return None
    return False


async def _on_lost(engine: Engine, worker: Worker, patience: Patience) -> str | None:
    try:
        return engine.on_lost_kv(await _get(worker, engine.settings_path, patience))
    except EngineError:
        return None  # most servers keep their settings to themselves


async def _get(worker: Worker, path: str, patience: Patience) -> bytes:
    reply = Collected(_MAX_REPLY_BYTES)
    await worker.pool.get(path.encode(), _HEADERS, reply, patience)
    if reply.status != 200:
        raise EngineError(f"it answered {path} with {reply.status}")
    return reply.body()
