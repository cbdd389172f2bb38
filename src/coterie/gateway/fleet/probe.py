"""Asks workers whether they are well and can do their part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from coterie.core import ModelGeometry
from coterie.engines.base import Body, Call, Engine, Handoff
from coterie.errors import EngineError, WireError
from coterie.gateway.config import GatewayConfig
from coterie.gateway.fleet.transfers import look
from coterie.gateway.fleet.workers import Worker
from coterie.gateway.legs.upstream import Collected, Patience

_HEADERS = b"x-request-id: coterie-probe\r\n"
_MAX_REPLY_BYTES = 64 << 20
_log = logging.getLogger("coterie.gateway")


class ProbeError(EngineError):
    """A worker cannot do its part.

    Attributes:
        worker: which.
        answered: whether it answered at all, so that waiting will not mend it.
    """

    def __init__(self, worker: Worker, what: str, *, answered: bool) -> None:
        super().__init__(f"{worker.role} worker {worker.name} {what}")
        self.worker = worker
        self.answered = answered


class Prober:
    """Checks workers one by one and in pairs.

    Attributes:
        models: what each worker serves, by its name.
        geometries: of the counts that each prefill worker's probe returned; a string says why there are none.
        pairing: probes of pairs under way.
    """

    def __init__(self, engine: Engine, config: GatewayConfig) -> None:
        self.models: dict[str, list[str]] = {}
        self.geometries: dict[str, ModelGeometry | str] = {}
        self.pairing: set[asyncio.Task[None]] = set()
        self._engine = engine
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Go by this configuration from the next request on."""
        self._quick = Patience(config.health_timeout_s, config.health_timeout_s)
        self._slow = Patience(config.prefill_timeout_s, config.idle_timeout_s)

    def forget(self, worker: Worker) -> None:
        """A worker is gone."""
        self.models.pop(worker.name, None)
        self.geometries.pop(worker.name, None)

    async def check(self, worker: Worker) -> None:
        """See whether a worker is well, and which models it has.

        Raises:
            EngineError: it is not.
        """
        await self._get(worker, self._engine.health_path)
        models = self._engine.model_ids(await self._get(worker, self._engine.models_path))
        if not models:
            raise ProbeError(worker, "serves no model", answered=True)
        self.models[worker.name] = models

    async def admit(self, worker: Worker, others: Sequence[Worker]) -> None:
        """Let a healthy worker do its part with each of `others`, of the other role.

        This connects each pair of servers, so that no client waits for that, and any decode worker can release
        any prefill worker's handoffs.

        Raises:
            ProbeError: the worker cannot do its part.
        """
        worker.met.clear()
        for other in others:
            other.met.discard(worker.name)
        if worker.role == "prefill" and not others:
            await self._prefill(worker)
        for other in others:
            try:
                await self._pair_whole(*((worker, other) if worker.role == "prefill" else (other, worker)))
            except ProbeError as error:
                if error.worker is worker:
                    raise
                _log.warning("while %s joined: %s", worker.name, error)
        for decode in [worker] if worker.role == "decode" else others:
            if others and not decode.transfer.fetches:
                await look(self._engine, decode, self._quick)

    async def _pair_whole(self, prefill: Worker, decode: Worker) -> None:
        """End what was begun even if nobody waits for it any more: until the second leg, the first one's KV is kept."""
        pair = asyncio.create_task(self._pair(prefill, decode))
        self.pairing.add(pair)
        pair.add_done_callback(self.pairing.discard)
        await asyncio.shield(pair)

    async def _pair(self, prefill: Worker, decode: Worker) -> None:
        call, handoff = await self._prefill(prefill)
        body = self._engine.decode_body(call, handoff)
        await self._post(decode, call, body)
        prefill.met.add(decode.name)
        decode.met.add(prefill.name)

    async def _prefill(self, worker: Worker) -> tuple[Call, Handoff]:
        call = self._engine.probe(self._model(worker))
        reply = await self._post(worker, call, self._engine.prefill_body(call))
        try:
            handoff = self._engine.handoff(reply)
        except EngineError as error:
            raise ProbeError(worker, f"({worker.url}) is not set up: {error}", answered=True) from None
        self.geometries[worker.name] = self._geometry(handoff)
        return call, handoff

    def _model(self, worker: Worker) -> str:
        if worker.name not in self.models:
            raise ProbeError(worker, "was removed meanwhile", answered=False)
        return self.models[worker.name][0]

    def _geometry(self, handoff: Handoff) -> ModelGeometry | str:
        try:
            counts = self._engine.counts(handoff)
        except WireError as error:
            return str(error)
        return counts.geometry if counts else "its replies carry no counts"

    async def _get(self, worker: Worker, path: str) -> bytes:
        reply = Collected(_MAX_REPLY_BYTES)
        await worker.pool.get(path.encode(), _HEADERS, reply, self._quick)
        return _expect_ok(worker, path, reply)

    async def _post(self, worker: Worker, call: Call, body: Body) -> bytes:
        reply = Collected(_MAX_REPLY_BYTES)
        try:
            await worker.pool.post(call.path.encode(), _HEADERS, body, reply, self._slow)
        except EngineError as error:
            raise ProbeError(worker, f"({worker.url}) failed the probe: {error}", answered=False) from None
        return _expect_ok(worker, call.path, reply)


def _expect_ok(worker: Worker, path: str, reply: Collected) -> bytes:
    body = reply.body()
    if reply.status != 200:
        start = body[:200].decode("utf-8", "replace")
        raise ProbeError(worker, f"({worker.url}) answered {path} with {reply.status}: {start}", answered=True)
    return body
