"""A server's HTTP side: whether it is ready, what it has, and how busy it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coterie.experts.server.metrics import ServerMetrics
from coterie.experts.server.nixl_slots import slot_for
from coterie.experts.transport.nixl import handshake
from coterie.json_http import json_reply, metrics_reply

if TYPE_CHECKING:
    from coterie.experts.server.process import ServerProcess, Serving


def app(process: ServerProcess) -> Starlette:
    """The HTTP side as an ASGI application; /load and /metrics answer 503 until the experts are loaded."""

    async def health(_: Request) -> Response:
        return json_reply({"phase": process.phase}, 200 if process.phase == "serving" else 503)

    async def config(_: Request) -> Response:
        return json_reply(describe(process))

    async def load(_: Request) -> Response:
        return json_reply(report(process.serving)) if process.serving else json_reply({"phase": process.phase}, 503)

    async def metrics(_: Request) -> Response:
        if process.serving is None:
            return json_reply({"phase": process.phase}, 503)
        registry = CollectorRegistry()
        registry.register(ServerMetrics(process.serving))
        return metrics_reply(generate_latest(registry))

    async def nixl(request: Request) -> Response:
        return slot_for(process.nixl, process.id, request.query_params.get("server"), process.over)

    handlers = {"/health": health, "/config": config, "/load": load, "/metrics": metrics, handshake.PATH: nixl}
    return Starlette(routes=[Route(path, handler) for path, handler in handlers.items()])


def describe(process: ServerProcess) -> dict[str, Any]:
    """What it is and where clients hand it requests; `kernel` is null until the experts are loaded."""
    model, geometry, serving = process.model, process.model.geometry, process.serving
    return {
        "phase": process.phase,
        "id": process.id,
        "name": process.config.name,
        "model": process.model_name,
        "fingerprint": process.fingerprint,
        "architecture": model.architecture,
        "layers": geometry.layers,
        "experts": geometry.experts,
        "top_k": geometry.top_k,
        "hidden": model.hidden,
        "slots": process.config.slots,
        "max_tokens": process.config.max_tokens,
        "kernel": serving.server.kernel.name if serving else None,
        "shared_memory": str(process.shared.path),
        "tcp": dict(zip(("host", "port"), process.tcp.address, strict=True)) if process.tcp else None,
        "nixl": process.nixl is not None,
        "since": serving.server.holding.since if serving else 0,
        "held": process.held,
    }


def report(serving: Serving) -> dict[str, Any]:
    """What it has computed since it started, and what waits now."""
    usage = serving.server.usage
    return {
        "since": serving.server.holding.since,
        "clients": serving.intake.clients,
        "queue": serving.intake.waiting,
        "requests": serving.requests,
        "batches": usage.batches,
        "merged": usage.merged,
        "tokens": usage.tokens,
        "active": usage.active,
        "batches_up_to_tokens": {str(2**n - 1): count for n, count in enumerate(usage.sizes) if count},
        "busy_s": usage.busy_s,
        "resident_bytes": resident_bytes(),
        "load": usage.load.tolist(),
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared memory of its slots included."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10
